"""The world: simulated processes and the events between them, run in one thread and in virtual time."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp.web_app

from tests.world.machine.disk import WorldDisk
from tests.world.machine.disk_faults import Surroundings
from tests.world.machine.draws import Draws
from tests.world.machine.loop import Killed
from tests.world.machine.network import Network
from tests.world.machine.process import GONE, NEVER, Death, Process
from tests.world.machine.spawn_faults import SpawnFaults

if TYPE_CHECKING:
    from tests.world.machine.host import WorldFolder, WorldPipe

SECOND = 1_000_000_000
#: World time at the start, when the host has been up for a while.
_BEGIN_NS = 1_000 * SECOND
_UNIX_NS = 1_800_000_000 * SECOND
#: Garbage is collected after fixed numbers of turns, because finalizers may run then.
_TURNS_OF_A_COLLECTION = 50_000


class StuckError(AssertionError):
    """What a run waits for has not happened in time."""


class Note(NamedTuple):
    """Something that happened. who: a process, or `world`."""

    time_ns: int
    who: str
    what: str


def collect() -> None:
    """Collect garbage. First clear aiohttp's cache of a thousand handlers, each of which keeps a server alive that may
    have ended long ago.
    """
    aiohttp.web_app._cached_build_middleware.cache_clear()
    gc.collect()


class _AroundDisk(Surroundings):
    """The world as its disk sees it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.faults = world.faults

    def unix_ns(self) -> int:
        return self._world.unix_ns

    def draw(self, what: str, number: int) -> int:
        return self._world.draws.draw(what, number)

    def spend(self, ns: int) -> None:
        if self._world.running is not None:
            self._world.running.spent_ns += ns

    def before_call(self, process: str, name: str, path: Path) -> bool:
        caller = self._world.by_name.get(process)
        if caller is None and process in self._world.calls_of_buried:
            raise Killed
        return caller is not None and caller.begin_call()

    def after_call(self, process: str, name: str, path: Path) -> None:
        caller = self._world.by_name.get(process)
        if caller is not None:
            caller.end_call()


class World:
    """A world, drawn from `seed`. now_ns: world time, which no process sees; unix_ns: what the host's wall clock
    shows; boot_ns: world time at which the monotonic clock was 0; deaths: which processes to kill, by name; faults: how
    often each has struck.
    """

    def __init__(self, seed: int, deaths: Mapping[str, Death] | None = None) -> None:
        self.draws = Draws(seed)
        self.deaths = deaths or {}
        self.now_ns = _BEGIN_NS
        self.boot_ns = 0
        self.num_boots = 1
        self.wall_offset_ns = _UNIX_NS
        self.faults: Counter[str] = Counter()
        #: The current settings; may be changed at any time.
        self.spawn_faults = SpawnFaults()
        self.network = Network(self)
        self.disk = WorldDisk(_AroundDisk(self))
        #: Pipes whose child has not opened its end yet, by the address of their inbox.
        self.pipes: dict[str, WorldPipe] = {}
        #: Shared folders, by path.
        self.folders: dict[str, WorldFolder] = {}
        self.processes: list[Process] = []
        #: Living processes, and those that have ended since the last garbage collection.
        self.by_name: dict[str, Process] = {}
        self.graves: list[Process] = []
        #: Processes that ended before that: how many calls into the system each made, and all of their errors.
        self.calls_of_buried: dict[str, int] = {}
        self._errors: list[str] = []
        #: What processes still had in use when their programs ended, in words.
        self.left: list[str] = []
        #: The process whose code is running now.
        self.running: Process | None = None
        self.num_turns = 0
        #: What has happened; None: it is not recorded.
        self.notes: list[Note] | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        #: Next turns as time, pid and process; a process whose plans have changed may be there more than once.
        self._due: list[tuple[int, int, Process]] = []
        #: Processes whose plans may have changed since they were last put there, in the order of the changes.
        self._changed: dict[Process, None] = {}
        self._num_pids = 1000

    def next_pid(self) -> int:
        """The pid of the next process."""
        self._num_pids += 1
        return self._num_pids

    def note(self, who: str, what: str) -> None:
        """Record that something happened."""
        if self.notes is not None:
            self.notes.append(Note(self.now_ns, who, what))

    def add(self, process: Process) -> None:
        """Register a new process. Its name may never be used again."""
        assert process.name not in self.by_name.keys() | self.calls_of_buried.keys(), process.name
        self.by_name[process.name] = process
        self.processes.append(process)
        self.note(process.name, f"begins as process {process.pid}")

    def remove(self, process: Process) -> None:
        """Remove a process that has ended."""
        self.note(process.name, f"ends with status {process.returncode}")
        self.disk.crash(process.name)
        self.processes.remove(process)
        self._changed.pop(process, None)
        process.planned_ns = GONE
        self.graves.append(process)

    def require_running(self) -> Process:
        """The process whose code is running now; there must be one."""
        assert self.running is not None
        return self.running

    @property
    def unix_ns(self) -> int:
        """What the host's wall clock shows."""
        return self.now_ns + self.wall_offset_ns

    @property
    def errors(self) -> list[str]:
        """The errors of all processes."""
        return self._errors + [error for process in self.by_name.values() for error in process.errors]

    @property
    def num_calls(self) -> dict[str, int]:
        """How many calls into the system each process has made."""
        return self.calls_of_buried | {name: process.num_calls for name, process in self.by_name.items()}

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Run an action at a world time."""
        self._num_events += 1
        heappush(self._events, (max(time_ns, self.now_ns), self._num_events, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Run an action after a delay."""
        self.at(self.now_ns + delay_ns, action)

    def run(self, until: Callable[[], bool], *, most_seconds: float) -> None:
        """Run the world until a condition holds. Raises StuckError if it does not hold within that time."""
        limit_ns = self.now_ns + round(most_seconds * SECOND)
        while not until():
            if not self._go_on(limit_ns):
                raise StuckError(f"still not so after {most_seconds} s; errors: {self.errors}")

    def run_for(self, seconds: float) -> None:
        """Run the world for this long."""
        limit_ns = self.now_ns + round(seconds * SECOND)
        while self._go_on(limit_ns):
            pass
        self.now_ns = limit_ns

    def _go_on(self, limit_ns: int) -> bool:
        """Run the next event or turn. False if it comes after the limit."""
        event_ns = self._events[0][0] if self._events else None
        process = self._next_process()
        if process is not None and (event_ns is None or process.planned_ns < event_ns):
            if process.planned_ns > limit_ns:
                return False
            self.now_ns = max(self.now_ns, process.planned_ns)
            heappop(self._due)
            process.planned_ns = NEVER
            self.num_turns += 1
            process.turn()
            self.changed(process)
            if self.num_turns % _TURNS_OF_A_COLLECTION == 0:
                self._collect()
        else:
            if event_ns is None or event_ns > limit_ns:
                return False
            self.now_ns = event_ns
            _, _, action = heappop(self._events)
            action()
        return True

    def changed(self, process: Process) -> None:
        """The process may now have to run earlier than planned."""
        self._changed[process] = None

    def _next_process(self) -> Process | None:
        """The process that runs next, the oldest one of several. It is on top of `_due`."""
        due = self._due
        for process in self._changed:
            due_ns = process.due_ns
            if due_ns < process.planned_ns:
                process.planned_ns = due_ns
                heappush(due, (due_ns, process.pid, process))
        self._changed.clear()
        while due:
            planned_ns, _, process = due[0]
            if process.planned_ns == planned_ns:
                due_ns = process.due_ns
                if due_ns == planned_ns:
                    return process
                # It has put off its next turn.
                process.planned_ns = due_ns
                if due_ns != NEVER:
                    heappush(due, (due_ns, process.pid, process))
            heappop(due)
        return None

    def _collect(self) -> None:
        """Let go of what dead processes hold: once collected, it tries in vain to shut down cleanly."""
        for process in self.graves:
            process.let_go()
            self.calls_of_buried[process.name] = self.by_name.pop(process.name).num_calls
            self._errors += process.errors
        self.graves.clear()
        collect()
