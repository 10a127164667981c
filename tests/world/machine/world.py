"""The world: simulated processes and what is under way between them, in one thread and in virtual time."""

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
#: The host was booted some time before.
_BEGIN_NS = 1_000 * SECOND
_UNIX_NS = 1_800_000_000 * SECOND
#: Garbage is collected at fixed points, since what it held may come to an end by that.
_TURNS_OF_A_COLLECTION = 50_000


class StuckError(AssertionError):
    """What was waited for does not come."""


class Note(NamedTuple):
    """Something that has happened. who: a process, or `world`."""

    time_ns: int
    who: str
    what: str


def collect() -> None:
    """Collect garbage, also what aiohttp keeps: a thousand handlers, each with all of a server that may have ended long
    ago.
    """
    aiohttp.web_app._cached_build_middleware.cache_clear()
    gc.collect()


class _AroundDisk(Surroundings):
    """The world, as its disk sees it."""

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
    """Everything is drawn from `seed`. now_ns: of the world, which no process sees; unix_ns: what the host's wall clock
    shows; boot_ns: when its monotonic clock was 0. deaths: of processes, by their names. faults: what they have
    done, by what it was.
    """

    def __init__(self, seed: int, deaths: Mapping[str, Death] | None = None) -> None:
        self.draws = Draws(seed)
        self.deaths = deaths or {}
        self.now_ns = _BEGIN_NS
        self.boot_ns = 0
        self.wall_offset_ns = _UNIX_NS
        self.faults: Counter[str] = Counter()
        #: As of now; may be set at any time.
        self.spawn_faults = SpawnFaults()
        self.network = Network(self)
        self.disk = WorldDisk(_AroundDisk(self))
        #: Pipes whose children have not opened their ends, by the addresses of their inboxes.
        self.pipes: dict[str, WorldPipe] = {}
        #: Those that processes share, by their paths.
        self.folders: dict[str, WorldFolder] = {}
        self.processes: list[Process] = []
        #: Those that live, and those that have ended since garbage was collected last.
        self.by_name: dict[str, Process] = {}
        self.graves: list[Process] = []
        #: Of those that ended before: how many calls into the system each has made, and their errors.
        self.calls_of_buried: dict[str, int] = {}
        self._errors: list[str] = []
        #: What processes had under way when their programs came to their ends, in words.
        self.left: list[str] = []
        #: The process whose code runs at the moment.
        self.running: Process | None = None
        self.num_turns = 0
        #: What has happened, if that is to be kept.
        self.notes: list[Note] | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        #: When processes run next, and their numbers; one whose plans have changed may be there more than once.
        self._due: list[tuple[int, int, Process]] = []
        #: Those whose plans may have changed since they were last put there, in the order in which they did.
        self._changed: dict[Process, None] = {}
        self._num_pids = 1000

    def next_pid(self) -> int:
        """Of the next process."""
        self._num_pids += 1
        return self._num_pids

    def note(self, who: str, what: str) -> None:
        """Something has happened."""
        if self.notes is not None:
            self.notes.append(Note(self.now_ns, who, what))

    def add(self, process: Process) -> None:
        """A process has begun. Its name is its own for ever."""
        assert process.name not in self.by_name.keys() | self.calls_of_buried.keys(), process.name
        self.by_name[process.name] = process
        self.processes.append(process)
        self.note(process.name, f"begins as process {process.pid}")

    def remove(self, process: Process) -> None:
        """A process has ended."""
        self.note(process.name, f"ends with status {process.returncode}")
        self.disk.crash(process.name)
        self.processes.remove(process)
        self._changed.pop(process, None)
        process.planned_ns = GONE
        self.graves.append(process)

    def require_running(self) -> Process:
        """The process whose code runs."""
        assert self.running is not None
        return self.running

    @property
    def unix_ns(self) -> int:
        """What the host's wall clock shows."""
        return self.now_ns + self.wall_offset_ns

    @property
    def errors(self) -> list[str]:
        """Of all processes."""
        return self._errors + [error for process in self.by_name.values() for error in process.errors]

    @property
    def num_calls(self) -> dict[str, int]:
        """Calls into the system, by process."""
        return self.calls_of_buried | {name: process.num_calls for name, process in self.by_name.items()}

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time."""
        self._num_events += 1
        heappush(self._events, (max(time_ns, self.now_ns), self._num_events, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now_ns + delay_ns, action)

    def run(self, until: Callable[[], bool], *, most_seconds: float) -> None:
        """Go on until something is so. Raises StuckError if it is not in that time."""
        limit_ns = self.now_ns + round(most_seconds * SECOND)
        while not until():
            if not self._go_on(limit_ns):
                raise StuckError(f"still not so after {most_seconds} s; errors: {self.errors}")

    def run_for(self, seconds: float) -> None:
        """Go on for so long."""
        limit_ns = self.now_ns + round(seconds * SECOND)
        while self._go_on(limit_ns):
            pass
        self.now_ns = limit_ns

    def _go_on(self, limit_ns: int) -> bool:
        """Let the next thing happen; False if that is after the limit."""
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
        """It may run sooner than it was to."""
        self._changed[process] = None

    def _next_process(self) -> Process | None:
        """The one that runs next, the oldest if there are several. It is on top of `_due`."""
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
                # It has put off what it was to do.
                process.planned_ns = due_ns
                if due_ns != NEVER:
                    heappush(due, (due_ns, process.pid, process))
            heappop(due)
        return None

    def _collect(self) -> None:
        """Let go of what the dead hold: it tries to end in order, and cannot."""
        for process in self.graves:
            process.let_go()
            self.calls_of_buried[process.name] = self.by_name.pop(process.name).num_calls
            self._errors += process.errors
        self.graves.clear()
        collect()
