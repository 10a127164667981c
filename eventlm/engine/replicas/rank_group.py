"""The ranks of one replica, which start together, take the same launches and end together.

One of them answers. What ends any of them ends all, and the reason is that of the one with which it began: a rank that
only noticed that another is gone, or waits for it, is not blamed while the other may still report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import structs

from eventlm.engine.replicas.rank_agreement import agreed
from eventlm.engine.replicas.worker_process import StartPatience, WorkerProcess
from eventlm.engine.request import EngineUnavailableError
from eventlm.launchers.launcher import Launcher, StartedRank, StartedRanks
from eventlm.system.parent_pipe import PipeError
from eventlm.system.system import System
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    PrepareGrammar,
    StartProgress,
    StepPayload,
    StepResult,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    encode,
)

#: How long a rank is waited for that is the reason of what another one has noticed.
GRACE_SECONDS = 0.3
#: A rank that has been silent for so many heartbeats is the reason of what another one has noticed.
SILENT_POLLS = 2
#: One that starts may be silent for so many times as long as one that serves: a library that is loaded may keep all of
#: its threads from running.
START_SILENCE = 3


class Loss(NamedTuple):
    """How a worker, or the first one of a replica's ranks, was lost.

    crashed: by its own code; otherwise it may have been killed or stopped from outside. desynced: the step in which it
    disagreed with the launch, -1 if it did not. noticed: another rank is the reason, which may show within so many
    seconds. rank, step: which one, and what it had in hand; -1 where there is one rank, or it is not known.
    """

    reason: str
    crashed: bool = False
    desynced: int = -1
    noticed: float = 0.0
    rank: int = -1
    step: int = -1


#: Takes a message of a rank; returns how the rank is lost by it, if it is.
Take = Callable[[int, FromWorker], Loss | None]


class StartAnswer(NamedTuple):
    """How a start ended: all ranks are ready and agree, or a rank sent another message, or none in time."""

    message: FromWorker | None
    rank: int = 0


class RankGroup:
    """The worker processes of one replica.

    setups: of its ranks, in order, as far as they are known before it is known where they run.
    """

    def __init__(
        self, system: System, setups: Sequence[WorkerSetup], launcher: Launcher, *, silence_seconds: int
    ) -> None:
        self.layout = setups[0].layout
        self._system = system
        self._setups = setups
        self._launcher = launcher
        self._workers: list[WorkerProcess] = []
        self._started: StartedRanks | None = None
        self._pulsing: asyncio.Task[None] | None = None
        self._silence_seconds = silence_seconds
        #: How long one call waits for a message. Silence is counted in such calls, not read from a clock: whatever
        #: kept this process from listening (a stopped process, a blocked loop) is not the worker's silence.
        self._poll_seconds = setups[0].heartbeat_ns / 1e9
        self._num_silent_polls = [0] * len(setups)
        #: Results that have not been sent to the stages that do not sample.
        self._results: list[tuple[int, list[list[int]]]] = []
        #: By the key of a grammar, the ranks that have not answered for it.
        self._building: dict[int, set[int]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; none before the start."""
        return [worker.pid for worker in self._workers]

    @property
    def addresses(self) -> tuple[str, str] | None:
        """Of the pipe to the only rank; None if there are several, or it is on another host."""
        return self._workers[0].addresses if len(self._workers) == 1 else None

    def ending(self, rank: int) -> str:
        """How a rank died, or was given up while it started, for a person; empty while it lives."""
        if not self._workers:
            return ""
        worker = self._workers[rank]
        ending = worker.ending or worker.given_up
        return f"on {worker.host} {ending}" if ending and worker.host else ending

    async def start(self, spawned: Sequence[StartedRank] = ()) -> None:
        """Start all of them, some in processes that were spawned before, and send their setups.

        Raises LaunchError or EngineUnavailableError if that cannot be.
        """
        try:
            self._started = await self._launcher.start(self._system, self._setups, spawned)
        except (OSError, PipeError) as error:
            raise EngineUnavailableError(f"cannot start worker {self._setups[0].replica}: {error}") from error
        silence_ns = self._silence_seconds * 1_000_000_000
        self._workers = [
            WorkerProcess(self._system, structs.replace(setup, silence_ns=silence_ns) if rank.host else setup)
            for setup, rank in zip(self._started.setups, self._started.ranks, strict=True)
        ]
        for worker, rank in zip(self._workers, self._started.ranks, strict=True):
            await worker.start(rank)
        if any(rank.host for rank in self._started.ranks):
            self._pulsing = asyncio.create_task(self._pulse())

    async def _pulse(self) -> None:
        while True:
            for worker in self._workers:
                if worker.clock is not None:
                    worker.pulse()
            await asyncio.sleep(self._poll_seconds)

    async def ready(
        self, timeout_seconds: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> StartAnswer:
        """Wait until all are ready: the answering rank's report, with the fewest blocks of any. Progress of any rank
        renews the time, and none may be silent for long; on_progress gets the progress of the answering one.

        Raises CheckpointError or EngineUnavailableError where they disagree.
        """
        patience = StartPatience(self._system.clock, timeout_seconds, START_SILENCE * self._silence_seconds)
        answer = await self._all_ready(patience, on_progress)
        if isinstance(answer.message, WorkerReady):
            for rank, worker in enumerate(self._workers):
                if not await worker.learn_time(patience):
                    return StartAnswer(None, rank)
        return answer

    async def _all_ready(
        self, patience: StartPatience, on_progress: Callable[[StartProgress], None] | None
    ) -> StartAnswer:
        if len(self._workers) == 1:
            return StartAnswer(await self._workers[0].answer(patience, on_progress))
        answering = self.layout.answering_rank
        asked = [
            asyncio.create_task(worker.answer(patience, on_progress if rank == answering else None))
            for rank, worker in enumerate(self._workers)
        ]
        try:
            failed = await self._first_failure(asked)
        finally:
            await _end(asked)
        if failed is not None:
            return failed
        reports = [task.result() for task in asked]
        where = [each.host for each in self._started.ranks] if self._started is not None else []
        return StartAnswer(agreed([each for each in reports if isinstance(each, WorkerReady)], where, answering))

    async def _first_failure(self, asked: list[asyncio.Task[FromWorker | None]]) -> StartAnswer | None:
        """The answer of the rank that keeps the group from starting; None: all are ready."""
        noticed: StartAnswer | None = None
        pending = set(asked)
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=GRACE_SECONDS if noticed is not None else None, return_when=asyncio.FIRST_COMPLETED
            )
            for rank, task in enumerate(asked):
                if task not in done or isinstance(task.result(), WorkerReady):
                    continue
                message = task.result()
                if not (isinstance(message, WorkerFailed) and message.lost_peer):
                    return StartAnswer(message, rank)
                noticed = noticed or StartAnswer(message, rank)
            if not done:
                break
        return noticed

    def send_step(self, body: bytes, payload: StepPayload) -> None:
        """Send a launch to all of them. Stages that do not sample get the tokens of the steps before it, too."""
        beside = encode(payload)
        if self.layout.stages > 1:
            results, self._results = self._results, []
            told = encode(structs.replace(payload, results=results))
        last_stage = self.layout.ranks_of_stage(self.layout.stages - 1)
        for rank, worker in enumerate(self._workers):
            worker.send_frames(body, beside if rank in last_stage else told)

    def note_result(self, result: StepResult) -> None:
        """Keep the tokens of a step for the stages that do not sample."""
        if self.layout.stages > 1:
            self._results.append((result.step, result.tokens))

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Have the ranks that draw tokens build a grammar: the answering one, and on GPUs all of the last stage."""
        ranks = {self.layout.answering_rank}
        if self._setups[0].device != "cpu":
            ranks.update(self.layout.ranks_of_stage(self.layout.stages - 1))
        self._building[message.key] = ranks
        for rank in sorted(ranks):
            self._workers[rank].send(message)

    def note_built(self, rank: int, answer: GrammarBuilt) -> bool:
        """Take in a rank's answer; whether it settles a grammar: all that draw have it, or this one cannot build it."""
        missing = self._building.get(answer.key, set())
        missing.discard(rank)
        if missing and not answer.error:
            return False
        return self._building.pop(answer.key, None) is not None

    async def listen(self, take: Take) -> Loss:
        """Pass on messages until a rank is lost; how the first of them was."""
        if len(self._workers) == 1:
            return await self._listen(0, take)
        listening = [asyncio.create_task(self._listen(rank, take)) for rank in range(len(self._workers))]
        try:
            loss = await self._first_cause(listening)
        finally:
            await _end(listening)
        if loss.step < 0 <= loss.rank and self._started is not None:
            loss = loss._replace(step=self._started.step_in_hand(loss.rank))
        return loss

    async def _listen(self, rank: int, take: Take) -> Loss:
        worker = self._workers[rank]
        while True:
            try:
                message = await worker.receive(self._poll_seconds)
            except TimeoutError:
                self._num_silent_polls[rank] += 1
                if self._num_silent_polls[rank] * self._poll_seconds >= self._silence_seconds:
                    return self._of(rank, self._silent())
                continue
            self._num_silent_polls[rank] = 0
            if message is not None:
                loss = take(rank, self._on_our_clock(rank, message))
            elif worker.is_end_of_all:
                return Loss(worker.ending)
            else:
                loss = Loss(worker.ending or worker.given_up, crashed=worker.crashed)
            if loss is not None:
                return self._of(rank, loss)

    def _on_our_clock(self, rank: int, message: FromWorker) -> FromWorker:
        """The times of a result are those of the hosts of its ranks."""
        if self._pulsing is None or not isinstance(message, StepResult):
            return message
        to_here = self._workers[rank].to_here
        stages = []
        for stage, (start_ns, end_ns) in enumerate(message.stages):
            of_stage = self._workers[self.layout.ranks_of_stage(stage)[0]].to_here
            stages.append((of_stage(start_ns), of_stage(end_ns)))
        first = stages[0][0] if stages else to_here(message.start_ns)
        return structs.replace(message, start_ns=first, end_ns=to_here(message.end_ns), stages=stages)

    async def _first_cause(self, listening: list[asyncio.Task[Loss]]) -> Loss:
        """The loss with which it began."""
        noticed: Loss | None = None
        pending = set(listening)
        clock = self._system.clock
        deadline_ns = 0
        while pending:
            timeout = max(deadline_ns - clock.monotonic_ns(), 0) / 1e9 if noticed is not None else None
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for loss in [task.result() for task in listening if task in done]:
                if not loss.noticed and not self._is_other_dead(loss):
                    return loss
                if noticed is None or (noticed.noticed and not loss.noticed):
                    noticed = loss
                    deadline_ns = clock.monotonic_ns() + round((loss.noticed or GRACE_SECONDS) * 1e9)
            if not done:
                break
        assert noticed is not None
        silent = [
            rank for rank, count in enumerate(self._num_silent_polls) if count >= SILENT_POLLS and rank != noticed.rank
        ]
        return self._of(silent[0], self._silent()) if silent and noticed.noticed else noticed

    def _is_other_dead(self, loss: Loss) -> bool:
        """Whether a rank speaks of its failure while another one is dead: that one's end is noticed a little later,
        once its last messages have been waited for.
        """
        own_end = loss.rank < 0 or self._workers[loss.rank].ending
        return not own_end and any(worker.ending for worker in self._workers)

    def _of(self, rank: int, loss: Loss) -> Loss:
        if host := self._workers[rank].host:
            loss = loss._replace(reason=f"on {host}: {loss.reason}")
        return loss._replace(rank=rank) if len(self._workers) > 1 else loss

    def _silent(self) -> Loss:
        return Loss(f"no heartbeat for {self._silence_seconds} s")

    async def stop(self) -> None:
        """Ask all of them to leave, and kill those that do not."""
        try:
            await asyncio.gather(*(worker.stop() for worker in self._workers))
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End all of them now, and everything that belongs to them. Harmless when called twice."""
        if self._pulsing is not None:
            self._pulsing.cancel()
        try:
            await asyncio.gather(*(worker.kill() for worker in self._workers))
        finally:
            if self._started is not None:
                self._started.release()


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel what still runs. What a call had received is not lost by that, see `WorkerProcess.receive`."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
