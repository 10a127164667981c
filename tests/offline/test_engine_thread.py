"""Waiting for the engine's thread."""

from __future__ import annotations

import concurrent.futures
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType

import pytest

from eventlm.offline.engine_thread import EngineThread, next_item


class Interrupted(Exception):
    """What the signal's handler raises."""


WAITS: list[Callable[[], object]] = [
    lambda: EngineThread.result(None, concurrent.futures.Future()),  # type: ignore[arg-type]
    lambda: next_item(queue.SimpleQueue()),
]


@pytest.mark.parametrize("wait", WAITS, ids=["result", "next_item"])
def test_a_signal_that_another_thread_gets_ends_the_wait(wait: Callable[[], object]) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def signal_this_thread() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.05, signal_this_thread)
    try:
        timer.start()
        with pytest.raises(Interrupted):
            wait()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
