"""The simulated host as one process sees it: implementations of what `eventlm.system.system.System` contains."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections import deque
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from eventlm.system.processes import PARENT_POLL_S, ProcessUsage
from eventlm.system.shared_folder import NO_STEP
from eventlm.system.system import System
from tests.world.machine.blocking import WorldLatch, run_program, suspend
from tests.world.machine.disk import MEMORY
from tests.world.machine.draws import DrawnChance
from tests.world.machine.file_tree import error_of
from tests.world.machine.loop import Killed
from tests.world.machine.network import Socket
from tests.world.machine.process import SIGKILL, Child, Process
from tests.world.machine.spawn_faults import Module, StartFault

_MESSAGE_NS = (10_000, 200_000)
_SPAWN_NS = (5_000_000, 200_000_000)
#: How long a parent waits for `spawn` to return the child.
_FORK_NS = (500_000, 20_000_000)
#: The most by which a late child delays its start; longer than any parent waits.
_LATE_NS = 200_000_000_000


class WorldClock:
    """The host's clocks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    def monotonic_ns(self) -> int:
        """As Clock.monotonic_ns."""
        return self._process.monotonic_ns

    def unix_ns(self) -> int:
        """As Clock.unix_ns."""
        return self._world.unix_ns

    def unix_s(self) -> int:
        """As Clock.unix_s."""
        return self._world.unix_ns // 1_000_000_000

    def boot_id(self) -> str:
        """As Clock.boot_id."""
        return f"boot {self._world.num_boots}"


class WorldThreads:
    """The threads of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def start(self, name: str) -> WorldThread:
        """As Threads.start."""
        return WorldThread(self._process, name)

    def run(self, name: str, program: Callable[[], Coroutine[Any, Any, None]]) -> WorldLatch:
        """As Threads.run."""
        ended, threads = self.latch(), self._process.threads

        def end(_: object) -> None:
            threads.remove(name)
            ended.set()

        threads.append(name)
        run_program(self._process, program, end)
        return ended

    def latch(self) -> WorldLatch:
        """As Threads.latch."""
        return WorldLatch(self._process)

    async def sleep(self, seconds: float) -> None:
        """As Threads.sleep."""
        await suspend(lambda go_on: self._process.after(round(seconds * 1e9), go_on))


class WorldThread:
    """Runs actions one after the other. Each runs some time after it was queued, once the time that it takes has
    passed.
    """

    def __init__(self, process: Process, name: str) -> None:
        process.threads.append(name)
        self._process = process
        self._name = name
        self._actions: deque[Callable[[], None]] = deque()
        self._busy_until_ns = 0

    def run(self, action: Callable[[], None]) -> None:
        """As TaskThread.run."""
        self._actions.append(action)
        if len(self._actions) == 1:
            self._begin()

    def _begin(self) -> None:
        world = self._process.world
        busy_ns = world.disk.draw_slowness()
        self._busy_until_ns = world.now_ns + busy_ns
        self._process.in_thread(self._act, busy_ns)

    def wait(self, timeout_seconds: float | None) -> bool:
        """As TaskThread.wait. The time spent waiting blocks the whole process."""
        process = self._process
        left_ns = max(self._busy_until_ns - process.world.now_ns, 0) if self._actions else 0
        if timeout_seconds is not None and left_ns > timeout_seconds * 1e9:
            process.spent_ns += round(timeout_seconds * 1e9)
            return False
        process.spent_ns += left_ns
        while self._actions:
            self._actions.popleft()()
        return True

    def stop(self) -> None:
        """As TaskThread.stop."""
        self._process.threads.remove(self._name)

    def _act(self) -> None:
        if self._actions:
            self._actions.popleft()()
            if self._actions:
                self._begin()


class WorldPipe:
    """A message pipe to a child. Messages arrive late but in order. A message to a dead process is lost, and so is one
    that had not yet left its sender when that was killed.
    """

    def __init__(self, process: Process, number: int) -> None:
        self._process = process
        self.addresses = (f"in-{number}", f"out-{number}")
        self._number = number
        #: The child, once it has opened its end.
        self.child: Process | None = None
        self._to_child: deque[tuple[bytes, ...]] = deque()
        self._take: Callable[[list[bytes]], None] | None = None
        self._to_parent: deque[bytes] = deque()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        #: For each direction: when the latest message arrives, and when it leaves its sender.
        self._last_ns, self._left_ns = [0, 0], [0, 0]
        self._num_messages = 0
        self._is_closed = False

    def send(self, *frames: bytes) -> None:
        """As ParentPipe.send."""
        with self._process.call():
            self._to_child.append(frames)
            if self._take is not None:
                self._later(self._process, self._pass_on)

    def pulse(self, message: bytes) -> None:
        """As ParentPipe.pulse: does nothing on a single host."""

    def receive(self) -> asyncio.Future[bytes]:
        """As ParentPipe.receive."""
        future: asyncio.Future[bytes] = self._process.loop.create_future()
        if self._to_parent:
            future.set_result(self._to_parent.popleft())
        else:
            self._waiting.append(future)
        return future

    def close(self) -> None:
        """As ParentPipe.close."""
        self._is_closed = True
        self._process.world.pipes.pop(self.addresses[0], None)

    def open_child(self, child: Process, take: Callable[[list[bytes]], None]) -> None:
        """The child opens its end, and takes messages from now on."""
        self.child, self._take = child, take
        for _ in self._to_child:
            self._later(self._process, self._pass_on)

    def answer(self, message: bytes) -> None:
        """The child sends a message."""
        assert self.child is not None
        with self.child.call():
            self._later(self.child, lambda: self._arrive(message))

    def _later(self, sender: Process, action: Callable[[], None]) -> None:
        world = self._process.world
        self._num_messages += 1
        latency_ns = world.draws.between(*_MESSAGE_NS, "message", self._number, self._num_messages)
        direction = int(sender is self.child)
        leaves_ns = self._left_ns[direction] = max(self._left_ns[direction], world.now_ns + latency_ns // 2)
        self._last_ns[direction] = max(self._last_ns[direction] + 1, world.now_ns + latency_ns)

        def arrive() -> None:
            if sender.returncode != -SIGKILL or sender.ended_ns >= leaves_ns:
                action()

        world.at(self._last_ns[direction], arrive)

    def _pass_on(self) -> None:
        frames = self._to_child.popleft()
        if self.child is not None and not self.child.is_dead and self._take is not None:
            take = self._take
            self.child.after(0, lambda: take(list(frames)))

    def _arrive(self, message: bytes) -> None:
        if self._process.is_dead or self._is_closed:
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                self._process.loop.call_soon(_deliver, future, message)
                return
        self._to_parent.append(message)


class WorldChildPipe:
    """The child's end of a pipe."""

    def __init__(self, pipe: WorldPipe, process: Process) -> None:
        self._pipe = pipe
        self._process = process
        self._messages: deque[list[bytes]] = deque()
        #: Resumes the program that waits for a message.
        self._go_on: Callable[[], None] = lambda: None
        pipe.open_child(process, self._take)

    def _take(self, frames: list[bytes]) -> None:
        self._messages.append(frames)
        self._go_on()

    async def wait(self, seconds: float) -> bool:
        """As ChildPipe.wait."""

        def begin(go_on: Callable[[], None]) -> None:
            self._go_on = go_on
            self._process.after(round(seconds * 1e9), go_on)

        if not self._messages and seconds > 0:
            await suspend(begin)
        return bool(self._messages)

    async def receive(self) -> list[bytes]:
        """As ChildPipe.receive."""

        def begin(go_on: Callable[[], None]) -> None:
            self._go_on = go_on

        if not self._messages:
            await suspend(begin)
        return self._messages.popleft()

    def sender(self) -> WorldSender:
        """As ChildPipe.sender."""
        return WorldSender(self._pipe)

    def pulses(self) -> None:
        """As ChildPipe.pulses: does nothing on a single host."""

    def close(self) -> None:
        """As ChildPipe.close. Nothing to flush: only a kill loses messages."""

    def remove(self) -> None:
        """As ChildPipe.remove: a simulated pipe has no files."""


class WorldSender:
    """Sends a child's messages to its parent."""

    def __init__(self, pipe: WorldPipe) -> None:
        self._pipe = pipe

    def send(self, message: bytes) -> None:
        """As Sender.send."""
        self._pipe.answer(message)

    def close(self) -> None:
        """As Sender.close."""


def _deliver(future: asyncio.Future[bytes], message: bytes) -> None:
    if not future.done():
        future.set_result(message)


class WorldPipes:
    """Makes a process's pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def open(self) -> WorldPipe:
        """As Pipes.open."""
        world = self._process.world
        pipe = WorldPipe(self._process, world.next_pid())
        world.pipes[pipe.addresses[0]] = pipe
        return pipe

    def open_child(self, inbox: str, outbox: str, ends: None = None) -> WorldChildPipe:
        """As Pipes.open_child. It can be opened only once."""
        return WorldChildPipe(self._process.world.pipes.pop(inbox), self._process)

    def pair(self) -> tuple[Socket, Socket]:
        """As Pipes.pair."""
        return self._process.world.network.pair(self._process, self._process)


class WorldProcesses:
    """Starts children. modules: what can be run in them, by name."""

    def __init__(self, process: Process, modules: Mapping[str, Module]) -> None:
        self._process = process
        self._modules = modules
        self._num_spawned = 0

    @property
    def pid(self) -> int:
        """As Processes.pid."""
        return self._process.pid

    @property
    def parent_pid(self) -> int:
        """As Processes.parent_pid."""
        parent = self._process.parent
        return parent.pid if parent is not None else 1

    @property
    def keeper_pid(self) -> int:
        """As Processes.keeper_pid."""
        return 0

    async def orphaned(self, parent_pid: int) -> None:
        """As Processes.orphaned."""
        process, parent = self._process, self._process.parent
        assert parent is not None
        assert parent.pid == parent_pid

        def begin(go_on: Callable[[], None]) -> None:
            process.on_orphaned = lambda: process.after(0, go_on)

        if not parent.is_dead:
            await suspend(begin)
        delay_ns = process.world.draws.between(0, round(PARENT_POLL_S * 1e9), "orphan", process.pid)
        await suspend(lambda go_on: process.after(delay_ns, go_on))

    def adopt_orphans(self) -> None:
        """As Processes.adopt_orphans: the world knows whose descendant a process is."""

    async def end_orphans(self, spawned: Container[int]) -> None:
        """As Processes.end_orphans."""
        for each in [*self._process.world.processes]:
            parent = each.parent
            if parent is not None and parent.is_dead and parent.parent is self._process and each.pid not in spawned:
                each.end(-SIGKILL)

    def exit(self, status: int, line: str = "") -> NoReturn:
        """As Processes.exit."""
        if line and self._process.child is not None:
            self._process.child.print_line(line)
        self._process.end(status)
        raise Killed

    def usage(self) -> ProcessUsage:
        """As Processes.usage: nothing is measured."""
        return ProcessUsage(0, 0)

    async def spawn(
        self,
        module: str,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        stdout: int,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """As Processes.spawn."""
        parent, runs = self._process, self._modules[module]
        with parent.call():
            self._num_spawned += 1
            fault, detail = self._draw_fault(module)
            if fault == "refused":
                raise error_of(errno.ENOMEM if detail % 2 else errno.EAGAIN)
            process = Process(parent.world, f"{module} {self._num_spawned} of {parent.name}", parent)
            for number in pass_fds:
                parent.handles[number].held_by(process)
            child = Child(process, stdout=stdout)
            delay_ns = parent.world.draws.between(*_SPAWN_NS, "spawn", process.pid)
            if fault == "late":
                process.freeze(detail % _LATE_NS, "late")

            def begin() -> None:
                match fault:
                    case "exits":
                        process.end(detail % 3)
                    case "killed":
                        process.end(-SIGKILL)
                    case "says wrong hello":
                        runs.say_wrong(process, child, arguments)
                    case _:
                        runs.run(process, child, arguments)

            process.after(delay_ns, begin)
        fork_ns = parent.world.draws.between(*_FORK_NS, "fork", process.pid)
        try:
            await asyncio.sleep(fork_ns / 1e9)
        except asyncio.CancelledError:
            # Nobody will have the child, so it is killed.
            process.end(-SIGKILL)
            raise
        return child

    def _draw_fault(self, module: str) -> tuple[StartFault | None, int]:
        """Draw the fault of the next child, and a number that decides its details."""
        world, name = self._process.world, f"of a start of {self._process.name}"
        fault = world.spawn_faults.fault_of(module, world.draws.draw(f"fault {name}", self._num_spawned))
        if fault is not None:
            world.faults[f"{module} start {fault}"] += 1
        return fault, world.draws.draw(f"detail {name}", self._num_spawned)


class WorldBoard:
    """The step that each rank is working on."""

    def __init__(self, size: int) -> None:
        self._steps = [NO_STEP] * size

    def write(self, number: int, step: int) -> None:
        """As Board.write."""
        self._steps[number] = step

    def read(self, number: int) -> int:
        """As Board.read."""
        return self._steps[number]


class WorldFolder:
    """A folder that ranks share. maker: the process that made it."""

    def __init__(self, maker: Process) -> None:
        self.path = MEMORY / f"ranks-{maker.world.next_pid()}"
        self.maker = maker
        self.board = WorldBoard(0)
        maker.world.folders[str(self.path)] = self

    def remove(self) -> None:
        """As Folder.remove."""
        self.maker.world.folders.pop(str(self.path), None)


class WorldSharedFolders:
    """The host's shared folders, as a process sees them."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def lasting(self) -> Path:
        """As SharedFolders.lasting."""
        return MEMORY / "eventlm"

    def make(self) -> WorldFolder:
        """As SharedFolders.make. Folders whose makers have died are removed first."""
        for folder in [*self._process.world.folders.values()]:
            if folder.maker.is_dead:
                folder.remove()
        return WorldFolder(self._process)

    def board(self, folder: str | Path, *, size: int | None = None) -> WorldBoard:
        """As SharedFolders.board."""
        found = self._process.world.folders[str(folder)]
        if size is not None:
            found.board = WorldBoard(size)
        return found.board

    def remove(self, folder: str | Path) -> None:
        """As SharedFolders.remove."""
        self._process.world.folders.pop(str(folder), None)


def system_of(process: Process, modules: Mapping[str, Module]) -> System:
    """The simulated host as a process sees it. modules: what its children can run, by name."""
    return System(
        clock=WorldClock(process),
        chance=DrawnChance(process.world.draws, process.name),
        disk=process.world.disk.of(process.name),
        threads=WorldThreads(process),
        processes=WorldProcesses(process, modules),  # type: ignore[arg-type]
        pipes=WorldPipes(process),  # type: ignore[arg-type]
        shared_folders=WorldSharedFolders(process),
    )
