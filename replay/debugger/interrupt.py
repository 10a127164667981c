"""How long work is interrupted: by a flag that another thread, or the handler of a signal, may set at any time."""

from __future__ import annotations

from eventlm.errors import EventLMError, ExitCode
from eventlm.types import OnProgress

#: Checks between two calls of `on_progress`.
_CHECKS_PER_PROGRESS = 2048


class InterruptedCommandError(EventLMError):
    """A command was interrupted. The position is that from before it."""

    exit_code = ExitCode.INTERRUPTED


class Interrupt:
    """Work calls `check` between two events. on_progress: gets events done and in all, now and then."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self.on_progress = on_progress
        self._is_requested = False
        self._done = 0
        self._total = 0

    def request(self) -> None:
        """End the work that is under way. Without any, nothing happens."""
        self._is_requested = True

    def begin(self, total: int = 0) -> None:
        """Work begins, over so many events, if that is known."""
        self._is_requested = False
        self.expect(total)

    def expect(self, total: int) -> None:
        """The part of the work that begins goes over so many events."""
        self._done, self._total = 0, total

    def check(self) -> None:
        """Another event is done. Raises InterruptedCommandError if the end was requested."""
        if self._is_requested:
            self._is_requested = False
            raise InterruptedCommandError("interrupted; the position is what it was")
        self._done += 1
        if self.on_progress is not None and self._total and self._done % _CHECKS_PER_PROGRESS == 0:
            self.on_progress(min(self._done, self._total), self._total)
