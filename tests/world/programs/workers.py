"""Worker processes: the real worker's loop over the fake model, whose time is the world's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from eventlm.events import Launched
from eventlm.system.shared_folder import Board
from eventlm.worker.fake.model import FakeModel, TimedFakeStep
from eventlm.worker.fake.runner import FakeDeath
from eventlm.worker.loop import WorkerLoop, load
from eventlm.worker.process import PARENT_POLL_S, STAY_SECONDS
from eventlm.worker.protocol import (
    FromWorker,
    Heartbeat,
    StartProgress,
    StepPayload,
    WorkerFailed,
    WorkerSetup,
    decode_to_worker,
    encode,
)
from tests.world.machine.host import WorldClock, WorldPipe, WorldPipes, WorldSharedFolders
from tests.world.machine.loop import Killed
from tests.world.machine.process import Child, Process
from tests.world.machine.spawn_faults import Module

MODULE = "eventlm.worker.process"
_POLL_NS = 20_000_000
_LOAD_NS = (50_000_000, 2_000_000_000)


class _Hang(Exception):
    """The step never ends."""


class WorldModel(FakeModel):
    """The fake model of one worker."""

    def __init__(self, setup: WorkerSetup, worker: WorldWorker) -> None:
        self._worker = worker
        super().__init__(setup, WorldClock(worker.process))

    def start(self, launch: Launched, payload: StepPayload) -> TimedFakeStep:
        """As FakeModel.start."""
        step = super().start(launch, payload)
        self._worker.step_ends(step.times_ns[1])
        return step

    def _die(self, death: FakeDeath) -> NoReturn:
        self._worker.child.print_line(f"fake worker: {death}")
        self._worker.process.end(1)
        raise Killed

    def _open_board(self, folder: str) -> Board:
        return self._worker.folders.board(folder)

    def _hang(self) -> NoReturn:
        self._worker.hang()
        raise _Hang

    def _await_rank(self, rank: int, step: int) -> None:
        board = self._board
        if board is not None and board.read(rank) < step:
            self._worker.hang(lambda: board.read(rank) >= step)


class WorldWorker:
    """One worker process, as `eventlm.worker.process` is."""

    def __init__(self, process: Process, child: Child, pipe: WorldPipe, folders: WorldSharedFolders) -> None:
        self.process = process
        self.child = child
        self.folders = folders
        self._pipe = pipe
        self._model: WorldModel | None = None
        self._board: Board | None = None
        self._setup: WorkerSetup | None = None
        self._loop: WorkerLoop | None = None
        self._is_hung = False
        #: Since when it has been; and what it says once that is over.
        self._hung_since_ns = 0
        self._held: list[FromWorker] = []
        self._step_in_hand = -1
        self._early: list[list[bytes]] = []
        parent = process.parent
        assert parent is not None
        if parent.is_dead:
            self._orphaned()
        else:
            parent.on_end(lambda _: self._orphaned())
        pipe.open_child(process, self._take)

    def step_ends(self, end_ns: int) -> None:
        """A step of the device is over at that time."""
        self.process.after(end_ns - self.process.monotonic_ns, self._answer)

    def hang(self, until: Callable[[], bool] | None = None) -> None:
        """Do nothing more, apart from heartbeats, until something is so."""
        assert self._loop is not None
        self._is_hung = True
        self._hung_since_ns = self._loop.busy_since_ns
        if until is not None:
            self.process.after(_POLL_NS, lambda: self._go_on_if(until))

    def _go_on_if(self, until: Callable[[], bool]) -> None:
        if not until():
            self.process.after(_POLL_NS, lambda: self._go_on_if(until))
            return
        self._is_hung = False
        held, self._held = self._held, []
        for message in held:
            self._send(message)
        self._leave_if_over()

    def _orphaned(self) -> None:
        """It notices within its poll's time that its parent has died."""
        world = self.process.world
        delay_ns = world.draws.between(0, round(PARENT_POLL_S * 1e9), "orphan", self.process.pid)
        self.process.after(delay_ns, lambda: self.process.end(1))

    def _take(self, frames: list[bytes]) -> None:
        if self._setup is None:
            setup = decode_to_worker(frames[0])
            assert isinstance(setup, WorkerSetup)
            self._setup = setup
            self._beat()
            delay_ns = self.process.world.draws.between(*_LOAD_NS, "load", self.process.pid)
            self._send(StartProgress(epoch=setup.epoch, phase="load weights", done=0, total=1))
            self.process.after(delay_ns, lambda: self._load(setup))
        elif self._loop is None:
            self._early.append(frames)
        elif not self._is_hung:
            self._guard(self._loop, lambda loop: loop.take(frames))

    def _load(self, setup: WorkerSetup) -> None:
        def make(setup: WorkerSetup, _: object) -> WorldModel:
            self._model = WorldModel(setup, self)
            return self._model

        if setup.peers.shared_memory:
            self._board = self.folders.board(setup.peers.shared_memory)

        runner, message = load(setup, self.process.pid, lambda *_: None, make)
        self._send(message)
        if runner is None:
            self.process.end(1)
            return
        self._loop = WorkerLoop(
            setup.epoch,
            runner,
            WorldClock(self.process),
            self._send,
            answers=setup.rank == setup.layout.answering_rank,
            hold_step=self._hold,
        )
        early, self._early = self._early, []
        for frames in early:
            self._take(frames)

    def _answer(self) -> None:
        loop = self._loop
        while loop is not None and not self._is_hung and not self.process.is_dead and loop.has_steps:
            if loop.is_running():
                return
            self._guard(loop, WorkerLoop.answer)

    def _guard(self, loop: WorkerLoop, act: Callable[[WorkerLoop], Iterable[FromWorker]]) -> None:
        for message in act(loop):
            if self._is_hung:
                self._held.append(message)
            else:
                self._send(message)
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        assert self._loop is not None
        assert self._setup is not None
        status = self._loop.exit_status
        if status is None or self._is_hung:
            return
        stays = bool(status) and self._setup.layout.num_ranks > 1
        self.process.after(round(STAY_SECONDS * 1e9) if stays else 0, lambda: self.process.end(status))

    def _hold(self, step: int) -> None:
        assert self._setup is not None
        self._step_in_hand = step
        if self._board is not None:
            self._board.write(self._setup.rank, step)

    def _send(self, message: FromWorker) -> None:
        if not self.process.is_dead:
            self._pipe.answer(encode(message))

    def _beat(self) -> None:
        assert self._setup is not None
        since_ns = self._loop.busy_since_ns if self._loop is not None else 0
        if self._is_hung:
            since_ns = self._hung_since_ns
        busy_ns = self.process.monotonic_ns - since_ns if since_ns else 0
        waits = self._model is not None and self._model.waits_for_peers
        self._send(Heartbeat(epoch=self._setup.epoch, busy_ns=busy_ns, step=self._step_in_hand, waits=waits))
        self.process.after(self._setup.heartbeat_ns, self._beat)


def module(pipes: WorldPipes, folders: WorldSharedFolders) -> Module:
    """That of workers. pipes, folders: of the engine."""

    def run(process: Process, child: Child, arguments: Sequence[str]) -> None:
        WorldWorker(process, child, pipes.by_address[arguments[0]], folders)

    def say_wrong(process: Process, child: Child, arguments: Sequence[str]) -> None:
        """It answers its setup with what nobody can read, or says that it cannot start."""
        pipe = pipes.by_address[arguments[0]]
        failed = encode(WorkerFailed(epoch=0, message="it has no memory"))
        pipe.open_child(
            process,
            lambda _: pipe.answer(b"hello" if process.world.draws.draw("wrong hello", process.pid) % 2 else failed),
        )
        assert process.parent is not None
        process.parent.on_end(lambda _: process.end(1))

    return Module(run, say_wrong)
