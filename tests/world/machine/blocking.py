"""Programs that block their thread on a real host. In the world they wait only through what a `System` provides."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from tests.world.machine.loop import Killed
from tests.world.machine.process import Process

#: Starts a wait: has the given function called, in the process, when the wait is over. Further calls are harmless.
Begin = Callable[[Callable[[], None]], None]


@types.coroutine
def suspend(begin: Begin) -> Generator[Begin, None, None]:
    """Suspend the program until the wait is over."""
    yield begin


def run_program(
    process: Process, program: Callable[[], Coroutine[Any, Any, Any]], on_end: Callable[[Any], None]
) -> None:
    """Start the program in a thread of the process. on_end: gets the program's result. An error ends the process."""
    begun: Coroutine[Any, Any, Any] | None = None
    num_waits = 0

    def go_on() -> None:
        nonlocal begun, num_waits
        num_waits += 1
        number = num_waits
        begun = begun or program()
        try:
            begin_wait = begun.send(None)
        except StopIteration as end:
            on_end(end.value)
        except Exception as error:
            # An orphan may fail because what it needs is gone.
            if process.parent is None or not process.parent.is_dead:
                process.errors.append(f"{process.name} has failed: {error!r}")
            process.end(1)
            raise Killed from error
        else:
            begin_wait(lambda: go_on() if number == num_waits else None)

    process.in_thread(go_on)


class WorldLatch:
    """A latch that programs of a process can wait for."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_set = False
        self._waiting: dict[int, Callable[[], None]] = {}
        self._num_waits = 0

    def set(self) -> None:
        """As Latch.set."""
        self._is_set = True
        for go_on in self._waiting.values():
            self._process.after(0, go_on)

    async def wait(self, timeout_seconds: float) -> bool:
        """As Latch.wait."""
        self._num_waits += 1
        number = self._num_waits

        def begin(go_on: Callable[[], None]) -> None:
            self._waiting[number] = go_on
            self._process.after(round(timeout_seconds * 1e9), go_on)

        if not self._is_set and timeout_seconds > 0:
            await suspend(begin)
            del self._waiting[number]
        return self._is_set
