"""The shell of one replica: keeps a worker running, and turns its messages and its death into facts.

A worker that dies, goes silent, hangs in a step or disagrees with a launch is lost: it is killed, the fact is queued,
and another one starts with the next epoch. Its sequences are recomputed from the token histories.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import structlog
from msgspec import structs

from eventlm.config import CoreConfig, WorkerConfig
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.replicas.spawned_worker import SpawnedWorker
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.result_check import ResultMismatchError
from eventlm.errors import CheckpointError
from eventlm.events import Desynced, Fact, Launched, WorkerLost, WorkerUp
from eventlm.system.clock import Clock
from eventlm.system.system import System
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    Heartbeat,
    PrepareGrammar,
    StartProgress,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from eventlm.worker.start_report import LOADING_LIBRARIES

#: Wait before the first restart in a row, doubled with each further one.
RESTART_SECONDS = 0.1
#: The wait is doubled at most this often.
MAX_DOUBLINGS = 8
#: A worker that has been idle for so long is sound: what ends it later is not one more restart in a row.
STEADY_SECONDS = 60

OnProgress = Callable[[StartProgress], None]

log = structlog.get_logger("eventlm.replica")


class ReplicaOwner(Protocol):
    """What a replica needs of the engine that owns it."""

    def put_fact(self, fact: Fact) -> None:
        """Queue a fact."""
        ...

    def complete(self, replica: int, result: StepResult) -> None:
        """Queue a step's completion. Raises ResultMismatchError if it does not answer what was launched."""
        ...

    @property
    def grammars(self) -> GrammarBuilds:
        """Takes which workers are up, and what they have built."""
        ...


class Loss(NamedTuple):
    """How a worker was lost. `crashed`: by its own code; otherwise it may have been killed or stopped from outside."""

    reason: str
    crashed: bool = False


class StartPhases:
    """What one worker does before it is ready. Logs each phase, with its time, once it is over."""

    def __init__(self, clock: Clock, setup: WorkerSetup, on_progress: OnProgress | None = None) -> None:
        #: The current one; empty before the first.
        self.phase = ""
        self._clock = clock
        self._setup = setup
        self._on_progress = on_progress
        self._began_ns = 0

    def note(self, progress: StartProgress) -> None:
        """Take a message, of this phase or a new one, and pass it on."""
        if progress.phase != self.phase:
            self._log_end(next=progress.phase)
            self.phase, self._began_ns = progress.phase, self._clock.monotonic_ns()
        if self._on_progress is not None:
            self._on_progress(progress)

    def end(self) -> None:
        """The worker is ready."""
        self._log_end()
        self.phase = ""

    def _log_end(self, **following: str) -> None:
        if self.phase:
            log.info(
                "worker starts",
                replica=self._setup.replica,
                epoch=self._setup.epoch,
                phase=self.phase,
                seconds=round((self._clock.monotonic_ns() - self._began_ns) / 1e9, 2),
                **following,
            )


class ReplicaController:
    """Owns the worker of one replica.

    `setup` is that of its first worker, apart from the warm-up. Later ones differ in the epoch, measure nothing, and
    have the KV blocks of the run.
    """

    def __init__(
        self,
        system: System,
        setup: WorkerSetup,
        config: WorkerConfig,
        engine: ReplicaOwner,
        on_dead: Callable[[str], None],
    ) -> None:
        self.index = setup.replica
        self._system = system
        self._setup = setup
        self._config = config
        self._engine = engine
        self._on_dead = on_dead
        self._worker: WorkerProcess | None = None
        self._task: asyncio.Task[Any] | None = None
        self._num_failures = 0
        #: How long one call waits for a message. Silence is counted in such calls, not read from a clock: whatever
        #: kept this process from listening (a stopped process, a blocked loop) is not the worker's silence.
        self._poll_seconds = setup.heartbeat_ns / 1e9
        self._num_silent_polls = 0
        #: Heartbeats of the present worker while it had nothing to do; one that hangs in a step sends some as well.
        self._num_idle_beats = 0

    @property
    def worker_pid(self) -> int:
        """Process id of the present worker, 0 if there is none."""
        return self._worker.pid if self._worker is not None else 0

    async def start(
        self, *, warm_up: bool, spawned: SpawnedWorker | None = None, on_progress: OnProgress | None = None
    ) -> WorkerReady:
        """Bring the first worker up, which may be spawned already; `on_progress` is called with its progress.

        Raises CheckpointError or EngineUnavailableError if it cannot start.
        """
        setup = structs.replace(self._setup, warm_up=warm_up)
        starting = asyncio.create_task(self._spawn(setup, spawned, on_progress), name=f"start of replica {self.index}")
        self._task = starting
        try:
            return await starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineUnavailableError("the engine was stopped while it started") from None

    def run(self, core: CoreConfig) -> None:
        """The run has begun, within these limits: begin to listen to the first worker."""
        self._setup = structs.replace(self._setup, num_blocks=core.num_blocks, max_model_len=core.max_model_len)
        self._put_up()
        self._task = asyncio.create_task(self._supervise(), name=f"replica {self.index}")

    def ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        """Send a launch to the worker of its epoch."""
        if self._worker is not None and self._setup.epoch == launched.epoch:
            self._worker.send_step(body, payload)

    def forgive(self) -> None:
        """Count the restarts in a row from 0 again: what made them necessary has ended."""
        self._num_failures = 0

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Have the present worker build a grammar; it answers to `ReplicaOwner.grammars`."""
        if self._worker is not None:
            self._worker.send(message)

    def _put_up(self) -> None:
        self._engine.put_fact(WorkerUp(replica=self.index, epoch=self._setup.epoch))
        # Grammars of live requests are on their way before any step is.
        self._engine.grammars.worker_up(self.index)

    def _put_lost(self, loss: Loss) -> None:
        self._engine.put_fact(
            WorkerLost(replica=self.index, epoch=self._setup.epoch, reason=loss.reason, crashed=loss.crashed)
        )
        self._engine.grammars.worker_lost(self.index)

    async def stop(self) -> None:
        """End the worker and the supervision."""
        if self._task is not None:
            # Not twice: it may be cleaning up after an earlier cancellation, which this one would interrupt.
            if not self._task.cancelling():
                self._task.cancel()
            await asyncio.wait({self._task})
        if self._worker is not None:
            await self._worker.stop()
            self._worker = None

    async def _spawn(
        self, setup: WorkerSetup, spawned: SpawnedWorker | None = None, on_progress: OnProgress | None = None
    ) -> WorkerReady:
        worker = self._worker = WorkerProcess(self._system, setup)
        phases = StartPhases(self._system.clock, setup, on_progress)
        if spawned is not None:
            # It began to when it was spawned, and could not report it.
            phases.note(StartProgress(epoch=setup.epoch, phase=LOADING_LIBRARIES))
        try:
            await worker.start(spawned)
            message = await worker.answer(self._config.start_timeout_seconds, phases.note)
        except BaseException:
            await self._discard()
            raise
        if isinstance(message, WorkerReady):
            phases.end()
            self._num_silent_polls = self._num_idle_beats = 0
            for note in message.notes:
                log.info(note, replica=self.index)
            return message
        ending = worker.ending or f"sent no valid message in {self._config.start_timeout_seconds} s"
        await self._discard()
        if isinstance(message, WorkerFailed):
            if message.exit_code:
                raise CheckpointError(message.message, exit_code=message.exit_code)
            self._log_crash(message)
            raise EngineUnavailableError(f"worker {self.index} failed to start: {message.message}")
        phase = f" ({phases.phase})" if phases.phase else ""
        raise EngineUnavailableError(f"worker {self.index} {ending} while it started{phase}; its output is above")

    async def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()

    async def _supervise(self) -> None:
        """Listen to one worker after the other until the replica is given up."""
        try:
            while True:
                loss = await self._listen()
                self._put_lost(loss)
                reason = loss.reason
                log.warning("worker lost", replica=self.index, epoch=self._setup.epoch, reason=reason)
                await self._discard()
                if not await self._restart():
                    break
        except Exception as error:
            reason = repr(error)
            self._put_lost(Loss("defect"))
            await self._discard()
            log.exception("a replica cannot go on: this is a defect, please report it", replica=self.index)
        self._on_dead(reason)

    async def _restart(self) -> bool:
        """Start the next worker, with patience; False if it is no use."""
        while self._num_failures < self._config.max_restarts:
            await asyncio.sleep(RESTART_SECONDS * 2 ** min(self._num_failures, MAX_DOUBLINGS))
            self._num_failures += 1
            self._setup = structs.replace(self._setup, epoch=self._setup.epoch + 1)
            try:
                await self._spawn(self._setup)
            except (CheckpointError, EngineUnavailableError) as error:
                log.error("worker did not start", replica=self.index, error=str(error))
                continue
            self._put_up()
            log.info("worker is back", replica=self.index, epoch=self._setup.epoch)
            return True
        return False

    async def _listen(self) -> Loss:
        """Turn messages into facts until the worker is lost."""
        worker = self._worker
        assert worker is not None
        while True:
            try:
                message = await worker.receive(self._poll_seconds)
            except TimeoutError:
                self._num_silent_polls += 1
                loss = self._silent()
            else:
                self._num_silent_polls = 0
                if message is not None:
                    loss = self._take(message)
                else:
                    loss = Loss(worker.ending or "unreadable message", crashed=worker.crashed)
            if loss is not None:
                return loss

    def _take(self, message: FromWorker) -> Loss | None:
        """One message; how the worker is lost by it, if it is."""
        if isinstance(message, StepResult):
            if message.epoch != self._setup.epoch:
                return Loss(f"wrong result of step {message.step}: it is of epoch {message.epoch}", crashed=True)
            try:
                self._engine.complete(self.index, message)
            except ResultMismatchError as error:
                return Loss(str(error), crashed=True)
            self._num_failures = 0
        elif isinstance(message, Heartbeat):
            if message.busy_ns > self._config.step_timeout_seconds * 1_000_000_000:
                return Loss(f"one step took longer than {self._config.step_timeout_seconds} s")
            self._note_beat(is_idle=message.busy_ns == 0)
        elif isinstance(message, GrammarBuilt):
            self._engine.grammars.built(self.index, message)
        elif isinstance(message, WorkerDesync):
            self._engine.put_fact(Desynced(replica=self.index, epoch=self._setup.epoch, step=message.step))
            return Loss(f"desync in step {message.step}: {message.detail}")
        elif isinstance(message, WorkerFailed):
            self._log_crash(message)
            return Loss(f"failed: {message.message}", crashed=True)
        return None

    def _note_beat(self, *, is_idle: bool) -> None:
        self._num_idle_beats += is_idle
        if self._num_idle_beats * self._poll_seconds >= STEADY_SECONDS:
            self._num_failures = 0

    def _log_crash(self, failed: WorkerFailed) -> None:
        log.error("worker failed", replica=self.index, epoch=failed.epoch, exception=failed.traceback)

    def _silent(self) -> Loss | None:
        """The loss of a worker that has sent nothing for too long."""
        if self._num_silent_polls * self._poll_seconds >= self._config.heartbeat_timeout_seconds:
            return Loss(f"no heartbeat for {self._config.heartbeat_timeout_seconds} s")
        return None
