"""The shell of one replica: keeps a worker running, and turns its messages and its death into facts.

A worker that dies, goes silent, hangs in a step or disagrees with a launch is lost: it is killed, the fact is queued,
and another one starts with the next epoch. Its sequences are recomputed from the token histories. A worker of several
ranks is lost with the first of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from msgspec import structs

from eventlm.config import CoreConfig, WorkerConfig
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.replicas.left_workers import LeftWorkers, describe
from eventlm.engine.replicas.rank_group import GRACE_SECONDS, Loss, RankGroup
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.result_check import ResultMismatchError
from eventlm.errors import CheckpointError, EventLMError
from eventlm.events import Desynced, Fact, Launched, WorkerLost, WorkerUp
from eventlm.launchers.launcher import Launcher, LaunchError, StartedRank
from eventlm.launchers.spawned_worker import kill_and_close
from eventlm.system.clock import Clock
from eventlm.system.left_process import LeftProcess
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
#: How long a worker that another engine has left may take to answer. It may be in a step.
TAKE_OVER_SECONDS = 10.0

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

    def room_changed(self) -> None:
        """A replica begins or ends to wait for room."""
        ...

    def left_changed(self) -> None:
        """What another engine could take over from this one has changed."""
        ...


class StartPhases:
    """What one worker does before it is ready. Logs each phase, with its time, once it is over. whose: names the
    worker in the log.
    """

    def __init__(self, clock: Clock, whose: Mapping[str, object], on_progress: OnProgress | None = None) -> None:
        #: The current one; empty before the first.
        self.phase = ""
        self._clock = clock
        self._whose = whose
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
                **self._whose,
                phase=self.phase,
                seconds=round((self._clock.monotonic_ns() - self._began_ns) / 1e9, 2),
                **following,
            )


class ReplicaController:
    """Owns the worker of one replica.

    `setups` are those of the ranks of its first worker, apart from the warm-up. Later ones differ in the epoch, measure
    nothing, and have the KV blocks of the run. model: what the log calls its model, in an engine of several.
    """

    def __init__(
        self,
        system: System,
        setups: Sequence[WorkerSetup],
        config: WorkerConfig,
        engine: ReplicaOwner,
        on_dead: Callable[[str], None],
        launcher: Launcher,
        *,
        model: str = "",
    ) -> None:
        self.index = setups[0].replica
        #: The replica in the log.
        self._names = {"replica": self.index} | ({"model": model} if model else {})
        #: Whether its worker takes steps.
        self.is_up = False
        self._system = system
        self._setups = list(setups)
        self._epoch = setups[0].epoch
        self._answering = setups[0].layout.answering_rank
        self._config = config
        self._engine = engine
        self._on_dead = on_dead
        self._launcher = launcher
        self._worker: RankGroup | None = None
        self._task: asyncio.Task[Any] | None = None
        self._num_failures = 0
        self._beat_seconds = setups[0].heartbeat_ns / 1e9
        #: Of the model that the present worker has loaded; None before that.
        self._fingerprint: str | None = None
        #: Whether its launcher has no room for another worker at present.
        self.waits_for_room = False
        #: Heartbeats of the present worker while it had nothing to do; one that hangs in a step sends some as well.
        self._num_idle_beats = 0

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks of the present worker; none if there is none."""
        return self._worker.pids if self._worker is not None else []

    @property
    def left(self) -> LeftProcess | None:
        """What another engine needs to take the present worker over; None if there is none, or it cannot."""
        addresses = self._worker.addresses if self._worker is not None else None
        if addresses is None or self._fingerprint is None:
            return None
        return LeftProcess(self.rank_pids[0], addresses, describe(self._setups[0], self._fingerprint))

    async def start(
        self,
        *,
        warm_up: bool,
        spawned: Sequence[StartedRank] = (),
        left: LeftWorkers | None = None,
        on_progress: OnProgress | None = None,
    ) -> WorkerReady:
        """Bring the first worker up; its first ranks may be spawned already, and `on_progress` gets its progress. Of
        those that are left by another engine, the worker of this replica is taken over, if that is possible.

        Raises CheckpointError, LaunchError or EngineUnavailableError if it cannot start.
        """
        starting = asyncio.create_task(
            self._start(warm_up, spawned, left, on_progress), name=f"start of replica {self.index}"
        )
        self._task = starting
        try:
            return await starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineUnavailableError("the engine was stopped while it started") from None

    async def _start(
        self,
        warm_up: bool,
        spawned: Sequence[StartedRank],
        left: LeftWorkers | None,
        on_progress: OnProgress | None,
    ) -> WorkerReady:
        rank = await left.take(self._setups[0]) if left is not None and len(self._setups) == 1 else None
        if rank is not None:
            self._change_setups(epoch=max(self._epoch, rank.epoch + 1))
            try:
                ready = await self._take_over(rank, warm_up=warm_up)
            except (EventLMError, OSError) as error:
                log.warning("a worker could not be taken over", **self._names, reason=str(error))
                self._change_setups(epoch=self._epoch + 1)
            else:
                await kill_and_close(spawned)
                return ready
        setups = [structs.replace(setup, warm_up=warm_up) for setup in self._setups]
        return await self._spawn(setups, spawned, on_progress)

    async def _take_over(self, rank: StartedRank, *, warm_up: bool) -> WorkerReady:
        """Go on with the worker of an engine that is gone."""
        pid = self._system.processes.pid
        # Should this engine die now, the next one takes another epoch.
        self._fingerprint = rank.fingerprint
        setups = [structs.replace(setup, warm_up=warm_up, engine_pid=pid) for setup in self._setups]
        return await self._spawn(setups, [rank], timeout_seconds=TAKE_OVER_SECONDS)

    def go_on(self, core: CoreConfig, epoch: int) -> None:
        """The first worker is to go on with a run of these limits, and is of this epoch."""
        self._change_setups(num_blocks=core.num_blocks, max_model_len=core.max_model_len, epoch=epoch)

    def run(self, core: CoreConfig) -> None:
        """The run has begun, within these limits: begin to listen to the first worker."""
        self._change_setups(num_blocks=core.num_blocks, max_model_len=core.max_model_len)
        self._engine.left_changed()
        self._put_up()
        self._task = asyncio.create_task(self._supervise(), name=f"replica {self.index}")

    def ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        """Send a launch to the worker of its epoch."""
        if self._worker is not None and self._epoch == launched.epoch:
            self._worker.send_step(body, payload)

    def forgive(self) -> None:
        """Count the restarts in a row from 0 again: what made them necessary has ended."""
        self._num_failures = 0

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Have the present worker build a grammar; it answers to `ReplicaOwner.grammars`."""
        if self._worker is not None:
            self._worker.prepare_grammar(message)

    def _change_setups(self, **changes: int) -> None:
        self._setups = [structs.replace(setup, **changes) for setup in self._setups]
        self._epoch = self._setups[0].epoch

    def _put_up(self) -> None:
        self.is_up = True
        self._engine.put_fact(WorkerUp(replica=self.index, epoch=self._epoch))
        # Grammars of live requests are on their way before any step is.
        self._engine.grammars.worker_up(self.index)

    def _put_lost(self, loss: Loss) -> None:
        self.is_up = False
        replica, epoch, rank = self.index, self._epoch, loss.rank
        if loss.desynced >= 0:
            self._engine.put_fact(Desynced(replica=replica, epoch=epoch, step=loss.desynced, rank=rank))
        self._engine.put_fact(
            WorkerLost(
                replica=replica, epoch=epoch, reason=loss.reason, crashed=loss.crashed, rank=rank, step=loss.step
            )
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
        self,
        setups: Sequence[WorkerSetup],
        spawned: Sequence[StartedRank] = (),
        on_progress: OnProgress | None = None,
        timeout_seconds: float = 0,
    ) -> WorkerReady:
        """timeout_seconds: 0: as configured."""
        timeout_seconds = timeout_seconds or self._config.start_timeout_seconds
        silence_seconds = self._config.heartbeat_timeout_seconds
        worker = self._worker = RankGroup(self._system, setups, self._launcher, silence_seconds=silence_seconds)
        phases = StartPhases(self._system.clock, self._names | {"epoch": setups[0].epoch}, on_progress)
        if spawned and not spawned[0].epoch:
            # It began to when it was spawned, and could not report it.
            phases.note(StartProgress(epoch=setups[0].epoch, phase=LOADING_LIBRARIES))
        try:
            await worker.start(spawned)
            if self._fingerprint is not None:
                self._engine.left_changed()
            message, rank = await worker.ready(timeout_seconds, phases.note)
        except BaseException:
            await self._discard()
            raise
        if isinstance(message, WorkerReady):
            phases.end()
            self._num_idle_beats = 0
            self._fingerprint = message.model_fingerprint
            self._engine.left_changed()
            for note in message.notes:
                log.info(note, **self._names)
            return message
        ending = worker.ending(rank) or f"sent no valid message in {timeout_seconds:g} s"
        await self._discard()
        raise self._start_error(message, rank, ending, phases.phase)

    def _start_error(self, message: FromWorker | None, rank: int, ending: str, phase: str) -> EventLMError:
        name = self._name(rank)
        if isinstance(message, WorkerFailed):
            if message.exit_code:
                where = f"{name}: " if len(self._setups) > 1 else ""
                return CheckpointError(f"{where}{message.message}", exit_code=message.exit_code)
            self._log_crash(message, rank)
            return EngineUnavailableError(f"{name} failed to start: {message.message}")
        phase = f" ({phase})" if phase else ""
        return EngineUnavailableError(f"{name} {ending} while it started{phase}; its output is above")

    def _name(self, rank: int) -> str:
        return (f"rank {rank} of " if len(self._setups) > 1 else "") + f"worker {self.index}"

    async def _discard(self) -> None:
        worker, self._worker = self._worker, None
        self._fingerprint = None
        self._engine.left_changed()
        if worker is not None:
            await worker.kill()

    async def _supervise(self) -> None:
        """Listen to one worker after the other until the replica is given up."""
        try:
            while True:
                assert self._worker is not None
                loss = await self._worker.listen(self._take)
                self._put_lost(loss)
                reason = loss.reason
                rank = {"rank": loss.rank} if loss.rank >= 0 else {}
                log.warning("worker lost", **self._names, **rank, epoch=self._epoch, reason=reason)
                await self._discard()
                if not await self._restart():
                    break
        except Exception as error:
            reason = repr(error)
            self._put_lost(Loss("defect"))
            await self._discard()
            log.exception("a replica cannot go on: this is a defect, please report it", **self._names)
        try:
            self._launcher.give_up(self.index)
        except Exception:
            log.exception("a launcher could not give up a replica", **self._names)
        self._on_dead(reason)

    async def _restart(self) -> bool:
        """Start the next worker, with patience; False if it is no use."""
        while self._num_failures < self._config.max_restarts:
            await asyncio.sleep(RESTART_SECONDS * 2 ** min(self._num_failures, MAX_DOUBLINGS))
            self._num_failures += 1
            self._change_setups(epoch=self._epoch + 1)
            try:
                await self._spawn(self._setups)
            except (CheckpointError, LaunchError, EngineUnavailableError) as error:
                self._note_start_error(error)
                continue
            self._note_room(waits=False)
            self._put_up()
            log.info("worker is back", **self._names, epoch=self._epoch)
            return True
        self._note_room(waits=False)
        return False

    def _note_start_error(self, error: EventLMError) -> None:
        waits = isinstance(error, LaunchError) and error.waits_for_room
        if waits:
            # It is no failure of the replica, however long it takes.
            self._num_failures -= 1
        if not (waits and self.waits_for_room):
            log.error("worker did not start", **self._names, error=str(error))
        self._note_room(waits=waits)

    def _note_room(self, *, waits: bool) -> None:
        if waits != self.waits_for_room:
            self.waits_for_room = waits
            self._engine.room_changed()

    def _take(self, rank: int, message: FromWorker) -> Loss | None:
        """One message of a rank; how the rank is lost by it, if it is."""
        if isinstance(message, StepResult):
            if message.epoch != self._epoch:
                return Loss(f"wrong result of step {message.step}: it is of epoch {message.epoch}", crashed=True)
            try:
                self._engine.complete(self.index, message)
            except ResultMismatchError as error:
                return Loss(str(error), crashed=True)
            assert self._worker is not None
            self._worker.note_result(message)
            self._num_failures = 0
        elif isinstance(message, Heartbeat):
            return self._take_beat(rank, message)
        elif isinstance(message, GrammarBuilt):
            assert self._worker is not None
            if self._worker.note_built(rank, message):
                self._engine.grammars.built(self.index, message)
        elif isinstance(message, WorkerDesync):
            step = message.step
            return Loss(f"desync in step {step}: {message.detail}", desynced=step, step=self._step_of_a_rank(step))
        elif isinstance(message, WorkerFailed):
            self._log_crash(message, rank)
            return Loss(
                f"failed: {message.message}",
                crashed=not message.lost_peer,
                noticed=GRACE_SECONDS if message.lost_peer else 0.0,
                step=self._step_of_a_rank(message.step),
            )
        return None

    def _take_beat(self, rank: int, beat: Heartbeat) -> Loss | None:
        if beat.busy_ns > self._config.step_timeout_seconds * 1_000_000_000:
            return Loss(
                f"one step took longer than {self._config.step_timeout_seconds} s",
                # The rank that it waits for says so with its next heartbeat.
                noticed=2 * self._beat_seconds + GRACE_SECONDS if beat.waits else 0.0,
                step=self._step_of_a_rank(beat.step),
            )
        if rank == self._answering:
            self._note_beat(is_idle=beat.busy_ns == 0)
        return None

    def _step_of_a_rank(self, step: int) -> int:
        """What a rank says that it has in hand; one process has its oldest step in hand, as the log knows."""
        return step if len(self._setups) > 1 else -1

    def _note_beat(self, *, is_idle: bool) -> None:
        self._num_idle_beats += is_idle
        if self._num_idle_beats * self._beat_seconds >= STEADY_SECONDS:
            self._num_failures = 0

    def _log_crash(self, failed: WorkerFailed, rank: int) -> None:
        which = self._names | ({"rank": rank} if len(self._setups) > 1 else {})
        if failed.lost_peer:
            log.info("a rank has lost another one", **which, epoch=failed.epoch, error=failed.message)
        else:
            log.error("worker failed", **which, epoch=failed.epoch, exception=failed.traceback)
