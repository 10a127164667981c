"""Programs that wait for nothing but what a `System` gives: those that block their threads on a real host."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from tests.world.machine.loop import Killed
from tests.world.machine.process import Process

#: Begins a wait: has the function called, in the process, when that is over. Later calls are harmless.
Begin = Callable[[Callable[[], None]], None]


@types.coroutine
def suspend(begin: Begin) -> Generator[Begin, None, None]:
    """Wait in a program."""
    yield begin


def run_program(
    process: Process, program: Callable[[], Coroutine[Any, Any, Any]], on_end: Callable[[Any], None]
) -> None:
    """Run it in a thread of a process, which begins soon. on_end: gets what it returns. An error ends the process."""
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
            # What an orphan needs may be gone.
            if process.parent is None or not process.parent.is_dead:
                process.errors.append(f"{process.name} has failed: {error!r}")
            process.end(1)
            raise Killed from error
        else:
            begin_wait(lambda: go_on() if number == num_waits else None)

    process.in_thread(go_on)


class WorldLatch:
    """What the programs of a process wait for."""

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
