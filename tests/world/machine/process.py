"""A simulated process with its loop, threads, children and open files, all of which end with it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tests.world.machine.left import left_in
from tests.world.machine.loop import Killed, ProcessLoop

if TYPE_CHECKING:
    from tests.world.machine.network import Handle
    from tests.world.machine.world import World

#: How long a turn of a loop takes, and how long an action in a thread.
_TURN_NS = (5_000, 60_000)
_THREAD_NS = (20_000, 500_000)
SIGKILL = 9
#: Time of the next turn of a process that has nothing to do (NEVER), or that has ended (GONE).
NEVER = 2**63
GONE = -1

When = Literal["before", "halfway", "after"]


class Death(NamedTuple):
    """Kills a process at one of its calls into the system. call: the number of the call, from 1."""

    call: int
    when: When


class Process:
    """A process of a world. pid: unique in that world."""

    def __init__(self, world: World, name: str, parent: Process | None = None) -> None:
        self.world = world
        self.name = name
        self.pid = world.next_pid()
        self.parent = parent
        #: The parent's view of this process, if a parent spawned it.
        self.child: Child | None = None
        #: Called when the parent ends.
        self.on_orphaned: Callable[[], None] | None = None
        self.is_dead = False
        self.returncode: int | None = None
        self.ended_ns = -1
        #: World time at which this process's monotonic clock was 0. Grows whenever that clock stands still.
        self._boot_ns = world.boot_ns
        #: The process does nothing before this time, since it has just run or is frozen.
        self.free_ns = world.now_ns
        #: World time of the next turn as last planned; the process may have put it off since.
        self.planned_ns = NEVER
        #: Open files, sockets and pipes by number.
        self.handles: dict[int, Handle] = {}
        #: Uncaught errors, and log lines that report a defect.
        self.errors: list[str] = []
        #: Names of the running threads.
        self.threads: list[str] = []
        self.loop = ProcessLoop(self)
        self._main: asyncio.Task[Any] | None = None
        self._on_end: list[Callable[[int], None]] = []
        self._num_turns = 0
        self._num_threaded = 0
        #: Until when it is frozen, and by which fault.
        self._frozen_until_ns, self._frozen_by = 0, ""
        self._slow_until_ns, self._slow_factor = 0, 1
        #: Time taken by calls into the system in this turn or thread action.
        self.spent_ns = 0
        #: How many calls into the system it has made.
        self.num_calls = 0
        self.death = world.deaths.get(name)
        self._is_dying = False
        world.add(self)

    def run(self, program: Coroutine[Any, Any, int | None]) -> None:
        """Run a program. Its result is the exit status."""
        self._main = self.loop.create_task(program)
        self._main.add_done_callback(self._ended)

    def _ended(self, main: asyncio.Task[Any]) -> None:
        if main.cancelled() or main.exception() is not None:
            if not main.cancelled() and not isinstance(main.exception(), Killed):
                self.errors.append(f"{self.name} has failed: {main.exception()!r}")
            self.end(1)
        else:
            self.world.left += [f"{each} of {self.name}" for each in left_in(self)]
            self.end(main.result() or 0)
        raise Killed

    def on_end(self, act: Callable[[int], None]) -> None:
        """Call a function with the exit status once the process has ended."""
        self._on_end.append(act)

    def note_error(self, context: dict[str, Any]) -> None:
        """Note an error that nothing in the loop caught."""
        if not self.is_dead and not isinstance(context.get("exception"), Killed):
            self.errors.append(f"{self.name}: {context['message']}: {context.get('exception')!r}")

    @property
    def monotonic_ns(self) -> int:
        """What the process's monotonic clock shows."""
        return self.world.now_ns - self._boot_ns

    def world_ns(self, monotonic_ns: int) -> int:
        """World time at which the monotonic clock will show this, unless the clock stands still before then."""
        return monotonic_ns + self._boot_ns

    @property
    def due_ns(self) -> int:
        """World time of the next turn; NEVER: there is nothing to do."""
        due_ns = self.loop.due_ns
        return NEVER if due_ns is None else max(due_ns, self.free_ns)

    def turn(self) -> None:
        """Run its loop once."""
        self._num_turns += 1
        world = self.world
        # Whatever came after the freeze did not have to wait.
        if world.now_ns == self._frozen_until_ns:
            self._count(self._frozen_by)
        world.running = self
        self.spent_ns = 0
        try:
            self.loop.run_once()
        except Killed:
            if not self.is_dead:
                raise
        finally:
            world.running = None
        turn_ns = world.draws.between(*_TURN_NS, "turn", self.pid, self._num_turns)
        is_slow = world.now_ns < self._slow_until_ns
        if is_slow:
            self._count("slowed")
        # A freeze may have begun in this turn.
        self.free_ns = max(self.free_ns, world.now_ns + turn_ns * (self._slow_factor if is_slow else 1) + self.spent_ns)

    def in_thread(self, action: Callable[[], None], busy_ns: int = 0) -> None:
        """Run an action in a thread, some time after the thread has been busy for `busy_ns`."""
        self._num_threaded += 1
        delay_ns = busy_ns + self.world.draws.between(*_THREAD_NS, "thread", self.pid, self._num_threaded)
        self.after(delay_ns, action)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Run an action outside the loop, after a delay by the process's clock, unless the process is dead by then."""
        due_ns = self.monotonic_ns + delay_ns

        def act() -> None:
            if self.is_dead:
                return
            if self.monotonic_ns < due_ns:
                self.world.at(self.world_ns(due_ns), act)
                return
            if self.free_ns > self.world.now_ns + _TURN_NS[1] * self._slow_factor:
                # The whole process is frozen, or in a slow call.
                if self._frozen_until_ns > self.world.now_ns:
                    self._count(self._frozen_by)
                self.world.at(self.free_ns, act)
                return
            self.world.running = self
            self.spent_ns = 0
            try:
                action()
            except Killed:
                if not self.is_dead:
                    raise
            finally:
                self.world.running = None

        self.world.after(delay_ns, act)

    def freeze(self, duration_ns: int, by: str = "frozen") -> None:
        """Stop the process for this long. by: the fault that is counted if the process had something to do."""
        self.free_ns = self._frozen_until_ns = max(self.free_ns, self.world.now_ns + duration_ns)
        self._frozen_by = by

    def _count(self, what: str) -> None:
        """Count a fault that has struck this process."""
        self.world.faults[f"{self.name.partition(' ')[0]} {what}"] += 1

    def suspend(self, duration_ns: int, *, stops_clock: bool) -> None:
        """Suspend the host for this long. stops_clock: the monotonic clock stands still meanwhile."""
        self.freeze(duration_ns, "suspended")
        if stops_clock:
            self._boot_ns += duration_ns

    @property
    def hindered_until_ns(self) -> int:
        """World time until which it was or will be frozen or slow."""
        return max(self._frozen_until_ns, self._slow_until_ns)

    def slow_until(self, time_ns: int, factor: int) -> None:
        """Until that time, make each turn take `factor` times as long."""
        self._slow_until_ns, self._slow_factor = time_ns, factor

    def begin_call(self) -> bool:
        """Begin a call into the system. Raises Killed if the process is dead or dies before the call. True: the process
        dies in the middle of the call, so do only half of it. In that case, and if the process dies after the call,
        `end_call` raises Killed.
        """
        if self.is_dead:
            raise Killed
        if self.world.running is not self:
            return False
        self.num_calls += 1
        death = self.death
        if death is None or self.num_calls != death.call:
            return False
        self._count(f"killed {death.when} a call")
        if death.when == "before":
            self.kill()
        self._is_dying = True
        return death.when == "halfway"

    def end_call(self) -> None:
        """End a call into the system, also one that failed."""
        if self._is_dying and not self.is_dead:
            self.kill()

    @contextlib.contextmanager
    def call(self) -> Iterator[bool]:
        """A call into the system. Yields whether to do only half of it."""
        is_cut = self.begin_call()
        try:
            yield is_cut
        finally:
            self.end_call()

    def kill(self) -> None:
        """Kill it as SIGKILL does. Raises ProcessLookupError if it has ended."""
        if self.is_dead:
            raise ProcessLookupError(3, "No such process")
        self.end(-SIGKILL)
        if self.world.running is self:
            raise Killed

    def end(self, returncode: int) -> None:
        """End the process: none of its code runs again, and the kernel closes its open files."""
        if self.is_dead:
            return
        self.is_dead = True
        self.returncode = returncode
        self.ended_ns = self.world.now_ns
        for handle in [*self.handles.values()]:
            handle.drop(self)
        for act in self._on_end:
            act(returncode)
        self.world.remove(self)
        for each in [*self.world.processes]:
            if each.parent is self and each.on_orphaned is not None:
                each.on_orphaned()

    def let_go(self) -> None:
        """Drop everything that it was about to do when it ended."""
        self._main = None
        self._on_end.clear()
        self.loop.let_go()


class Child:
    """A process as its parent sees it, like asyncio's. stdout: what the process prints, if that goes to a pipe."""

    stdin = None
    stderr = None

    def __init__(self, process: Process, *, stdout: int) -> None:
        assert process.parent is not None
        self.process = process
        process.child = self
        self.pid = process.pid
        self._loop = process.parent.loop
        self._parent = process.parent
        self.stdout = asyncio.StreamReader(loop=self._loop) if stdout == subprocess.PIPE else None
        self._ended: asyncio.Future[int] = self._loop.create_future()
        process.on_end(self._note_end)

    @property
    def returncode(self) -> int | None:
        """The exit status, once the parent has noticed the end."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """As asyncio.subprocess.Process.wait."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """As asyncio.subprocess.Process.kill."""
        with self._parent.call():
            self.process.kill()

    def print_line(self, line: str) -> None:
        """The process prints a line."""
        if self.stdout is not None and not self._parent.is_dead:
            self._loop.call_soon(self.stdout.feed_data, f"{line}\n".encode())

    def _note_end(self, returncode: int) -> None:
        if not self._parent.is_dead:
            self._parent.in_thread(lambda: self._loop.call_soon(self._see_end, returncode))

    def _see_end(self, returncode: int) -> None:
        if self.stdout is not None:
            self.stdout.feed_eof()
        if not self._ended.done():
            self._ended.set_result(returncode)
