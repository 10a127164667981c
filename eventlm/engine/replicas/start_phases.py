"""What a worker does before it is ready, for the log: a line for each phase once it is over, with its time."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from eventlm.worker.protocol import StartProgress, WorkerSetup

OnProgress = Callable[[StartProgress], None]

log = structlog.get_logger("eventlm.replica")


class StartPhases:
    """The start of one worker. `on_progress` is told, too, what it notes."""

    def __init__(self, setup: WorkerSetup, on_progress: OnProgress | None = None) -> None:
        #: Under way; empty before the first.
        self.phase = ""
        self._setup = setup
        self._on_progress = on_progress
        self._began_s = 0.0

    def note(self, progress: StartProgress) -> None:
        """The worker goes on, in this phase or a new one."""
        if progress.phase != self.phase:
            self._log_end(next=progress.phase)
            self.phase, self._began_s = progress.phase, time.monotonic()
        if self._on_progress is not None:
            self._on_progress(progress)

    def end(self) -> None:
        """The worker is ready."""
        self._log_end()
        self.phase = ""

    def _log_end(self, **following: str) -> None:
        if self.phase:
            log.info(
                "worker starts",
                replica=self._setup.replica,
                epoch=self._setup.epoch,
                phase=self.phase,
                seconds=round(time.monotonic() - self._began_s, 2),
                **following,
            )
