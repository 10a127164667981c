"""SIGTERM and SIGINT as events: the first asks for an orderly end, the second for a quick one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Within `with`, in a running loop, signals set `stop` and then `cut` and end nothing by themselves.

    SIGHUP calls `on_hangup`, where that is given.
    """

    def __init__(self, *, on_hangup: Callable[[], object] | None = None) -> None:
        self._on_hangup = on_hangup
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        #: The signal that set `stop`.
        self.received: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that a signal ended."""
        return 128 + (self.received or 0)

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._receive, number)
        if self._on_hangup is not None:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if self._on_hangup is not None:
            loop.remove_signal_handler(signal.SIGHUP)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.cut.set()
        self.received = self.received or number
        self.stop.set()
