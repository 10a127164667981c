"""Warns in the log of the process when a plug-in's answer is not used, and says why."""

from __future__ import annotations

import structlog

from eventlm.events import Event, PluginFailed

log = structlog.get_logger("eventlm.plugins")


class PluginFailures:
    """An observer of the bus. A plug-in may fail in every step, so it logs the first failure, then powers of ten."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._next_told = 1

    def observe(self, event: Event) -> None:
        """Take in the next event."""
        if not isinstance(event, PluginFailed):
            return
        self._num_failures += 1
        if self._num_failures == self._next_told:
            self._next_told *= 10
            log.warning(
                "a plug-in failed, its answer is not used",
                error=event.error,
                seq=event.s,
                num_failures=self._num_failures,
            )
