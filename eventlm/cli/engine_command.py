"""What the commands that run an engine have in common."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import start_progress, warn
from eventlm.config import Config
from eventlm.tasks import completed

if TYPE_CHECKING:
    from eventlm.bootstrap.composition import Composition
    from eventlm.engine.inference_engine import InferenceEngine

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_in_loop(config: Config, work: Coroutine[Any, Any, int]) -> int:
    """Set up the log and await `work` in an event loop; returns the exit code that it returns."""
    import uvloop

    from eventlm.cli.logging_setup import configure_logging

    configure_logging(config.log, default_level="warning")
    return uvloop.run(work)


def compose_and_warn(config: Config) -> Composition:
    """Compose an engine and print its warnings. Raises what `compose` raises."""
    from eventlm.bootstrap.composition import compose

    composed = compose(config)
    warn(composed.warnings)
    return composed


async def start_engine(engine: InferenceEngine) -> None:
    """Start an engine, with a progress bar. Raises what its `start` raises."""
    with start_progress(engine.setup.core.num_replicas) as on_progress:
        await engine.start(on_progress)


async def run_until_signal(engine: InferenceEngine, work: Coroutine[Any, Any, None]) -> int:
    """Start an engine, await `work` and stop the engine; returns 0, or the exit code of a signal that ended it."""

    async def run() -> None:
        await start_engine(engine)
        await work

    with StopSignals() as signals:
        try:
            is_completed = await completed(run(), signals.stop)
        finally:
            work.close()
            await engine.stop()
    return 0 if is_completed else signals.exit_code


class StopSignals:
    """Within `with`, in a running loop, signals set `stop` and then `cut` and end nothing by themselves.

    SIGHUP calls `on_hangup` and SIGUSR2 `on_restart`, where they are given.
    """

    def __init__(
        self, *, on_hangup: Callable[[], object] | None = None, on_restart: Callable[[], object] | None = None
    ) -> None:
        others = {signal.SIGHUP: on_hangup, signal.SIGUSR2: on_restart}
        self._actions = {number: action for number, action in others.items() if action is not None}
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        #: The signal that set `stop`.
        self.received: signal.Signals | None = None

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a program that a signal ended."""
        return 128 + (self.received or 0)

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._receive, number)
        for number, action in self._actions.items():
            loop.add_signal_handler(number, action)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (*_SIGNALS, *self._actions):
            loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if self.stop.is_set():
            self.cut.set()
        self.received = self.received or number
        self.stop.set()
