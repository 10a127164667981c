"""Re-execution: runs the recorded schedule on the model again and compares every token with the recorded one.

The trace has the launches and completions, its token log (`--record-tokens`) the prompts and outputs. The code that
keeps requests is that of the engine (`LiveRequests`). Real worker processes get the same launches: the same batches,
chunks and blocks, and the same worker epochs with empty caches. A step runs when the trace reaches its completion, so
steps that a lost worker never completed do not run. Decisions are taken from the trace; `verify` checks them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from msgspec import Struct, structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.segment_reader import LogLine
from eventlm.bus.token_log_reader import TokenLogReader, open_token_log
from eventlm.core.shards import Layout
from eventlm.engine.block_names import PAIRS_PER_BLOCK, BlockNames
from eventlm.engine.live_requests import LiveRequests, ServedModel
from eventlm.engine.recorded_request import recorded_request
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import (
    Arrived,
    Closing,
    Desynced,
    Emitted,
    Event,
    Finished,
    Header,
    Launched,
    Recovered,
    Rejected,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.replay.execute.executable import check_executable
from eventlm.replay.execute.token_comparison import Mismatch, ReExecutedStep, TokenComparison
from eventlm.replay.execute.workers import WorkerProcesses, Workers, worker_setup
from eventlm.replay.verify.divergence import Code
from eventlm.types import OnProgress, SequenceId
from eventlm.worker.protocol import StepPayload, WorkerSetup

#: Makes the workers of a run.
MakeWorkers = Callable[[Sequence[WorkerSetup], Header], Workers]


class ExecuteResult(Struct, frozen=True, kw_only=True):
    """The result of a re-execution. `exit_code` is 0 if there is no difference.

    num_tokens: those that are the same. num_steps: all that ran; num_steps_by_digest: of these, compared by the digests
    in the trace. host_differences: from the recorded host, which may explain mismatches. num_missing: events in a gap;
    nothing after it can run. damage: of the token logs, after which nothing can run.
    """

    path: str
    num_events: int
    num_requests: int
    num_steps: int
    num_tokens: int
    num_steps_by_digest: int
    is_teacher_forced: bool
    num_missing: int
    damage: str
    clean_end: bool
    still_being_written: bool
    host_differences: list[str] = []
    warnings: list[str] = []
    mismatches: list[Mismatch] = []

    @property
    def exit_code(self) -> int:
        """That of the first mismatch, else of damage, else of the gap, else 0."""
        if self.mismatches:
            return Code.TOKEN.value.exit_code
        if self.damage:
            return TraceCorruptError.exit_code
        return Code.GAP.value.exit_code if self.num_missing else 0


class _Stopped(Exception):
    """Nothing more can run: a mismatch, a gap, or damage."""


class _Waiting(NamedTuple):
    """A launch that has not completed."""

    launched: Launched
    body: bytes
    payload: StepPayload


def execute(
    path: Path | str,
    *,
    model: str,
    others: Sequence[str] = (),
    threads: int | None = None,
    layouts: Sequence[Layout] | None = None,
    teacher_force: bool = False,
    strict: bool = False,
    on_progress: OnProgress | None = None,
    make_workers: MakeWorkers = WorkerProcesses,
) -> ExecuteResult:
    """Run the steps of a trace again on the checkpoint in the folder `model` (or the fake one), those of further
    replicasets on `others`.

    threads: of each worker; layouts: of the replicas of each set; None: as recorded. teacher_force: after a mismatch
    continue with the recorded tokens to find all mismatches; otherwise the first one ends the run.

    Raises UsageError if the trace cannot be re-executed, EventLMError if a worker fails, and what LogReader raises.
    """
    header = check_executable(path)
    setups = [
        worker_setup(header, each, number=number, threads=threads, layout=layouts[number] if layouts else None)
        for number, each in enumerate((model, *others))
    ]
    workers = make_workers(setups, header)
    execution = _Execution(path, workers, header.sets_of_replicas(), is_forcing=teacher_force)
    with LogReader(path, strict=strict) as reader, contextlib.closing(execution):
        asyncio.run(_run(reader, execution, workers, on_progress))
        return ExecuteResult(
            path=str(path),
            num_events=reader.num_lines,
            num_requests=execution.num_requests,
            num_steps=execution.num_steps,
            num_tokens=execution.comparison.num_tokens,
            num_steps_by_digest=execution.comparison.num_steps_by_digest,
            is_teacher_forced=teacher_force,
            num_missing=reader.num_missing,
            damage=execution.damage,
            clean_end=reader.clean_end,
            still_being_written=reader.still_being_written,
            host_differences=workers.host_differences(),
            warnings=[*execution.bad_lines, *([] if execution.mismatches else reader.warnings())],
            mismatches=execution.mismatches,
        )


async def _run(reader: LogReader, execution: _Execution, workers: Workers, on_progress: OnProgress | None) -> None:
    """Feed all lines of the trace, as far as they can run."""
    lines = iter(reader)
    try:
        for line in lines:
            await execution.feed(line)
            if on_progress is not None:
                on_progress(reader.position, reader.size_bytes)
        execution.finish()
    except _Stopped:
        if not execution.mismatches:
            # The result still describes how the trace ends.
            collections.deque(lines, maxlen=0)
    finally:
        await workers.close()


class _Execution:
    """Takes the lines of a trace in order. Raises _Stopped if nothing more can run."""

    def __init__(self, path: Path | str, workers: Workers, sets: Sequence[int], *, is_forcing: bool) -> None:
        self.num_requests = 0
        self.num_steps = 0
        self.mismatches: list[Mismatch] = []
        #: Why the rest cannot run, if that is due to the token log.
        self.damage = ""
        self.comparison = TokenComparison(sets)
        self._path = path
        self._workers = workers
        self._is_forcing = is_forcing
        self._token_log: TokenLogReader | None = None
        self._bad_lines: list[str] = []
        self._live: LiveRequests | None = None
        self._epochs: dict[int, int] = {}
        self._waiting: dict[tuple[int, int, int], _Waiting] = {}
        #: Read at the first difference.
        self._ends: dict[SequenceId, int] | None = None
        #: The step that has run and whose `emit` has not come.
        self._step: ReExecutedStep | None = None

    @property
    def bad_lines(self) -> list[str]:
        """Damage in the token logs read so far."""
        return self._bad_lines + (self._token_log.damage if self._token_log is not None else [])

    def close(self) -> None:
        """Close the files."""
        if self._token_log is not None:
            self._token_log.close()

    async def feed(self, line: LogLine) -> None:
        """Take the next line."""
        if line.tag in _TAGS:
            try:
                await self._take(line.event(), line)
            except (KeyError, IndexError, ValueError, OverflowError) as error:
                raise TraceCorruptError(
                    f"{line.path}, line {line.number}: the `{line.tag}` does not follow from what comes before it; "
                    "`eventlm replay` finds where the trace was altered"
                ) from error

    def finish(self) -> None:
        """There are no more lines."""
        if self._step is not None:
            self._judge(set())

    async def _take(self, event: Event, line: LogLine) -> None:
        match event:
            case Header():
                self._open_token_log(event, line)
            case Arrived():
                self._arrive(event)
            case Rejected():
                self._requests.reject(event.request)
            case Launched():
                key = (event.replica, event.epoch, event.step)
                self._waiting[key] = _Waiting(event, line.body, self._requests.launch(event))
            case StepCompleted():
                await self._complete(event)
            case Emitted():
                self._emit(event)
            case Closing():
                self._requests.start_closing(event)
            case Finished():
                self._requests.finish(event)
            case WorkerUp():
                self._epochs[event.replica] = event.epoch
                self._requests.set_worker(event.replica, event.epoch)
            case WorkerLost() | Desynced():
                if event.epoch == self._epochs.get(event.replica):
                    await self._lose(event.replica)
            case Recovered():
                for replica in list(self._epochs):
                    await self._lose(replica)
            case _:
                # A gap: the state after it is in a snapshot, the KV cache is not.
                self.finish()
                raise _Stopped

    @property
    def _requests(self) -> LiveRequests:
        assert self._live is not None
        return self._live

    def _open_token_log(self, header: Header, line: LogLine) -> None:
        if self._token_log is not None:
            self._bad_lines += self._token_log.damage
            self._token_log.close()
        try:
            self._token_log = open_token_log(line.path, header)
        except (UsageError, TraceCorruptError) as error:
            # The first file was checked before.
            self._give_up(str(error))
        if self._live is None:
            self._live = _make_live(header, self._token_log.digest_key)

    def _arrive(self, arrived: Arrived) -> None:
        assert self._token_log is not None
        prompt = self._token_log.prompt(arrived)
        if prompt is None:
            self._give_up(
                f"{self._token_log.path} has no valid line for the prompt of request {arrived.s}; without it the "
                "request's steps cannot run"
            )
        self.num_requests += 1
        again = self._requests.arrive(
            arrived.s,
            recorded_request(arrived, prompt),
            lambda output: None,
            group_size=arrived.group_size,
            group_index=arrived.group_index,
        )
        if not self.comparison.blocks.pair(arrived.replicaset, arrived.blocks, again.blocks):
            self._found(
                Mismatch(kind="blocks", s=arrived.s, request=arrived.s, recorded=arrived.blocks, executed=again.blocks)
            )

    async def _complete(self, fact: StepCompleted) -> None:
        """Run the step; ignored if its worker was lost in the meantime."""
        waiting = self._waiting.pop((fact.replica, fact.epoch, fact.step), None)
        if waiting is None:
            return
        launched = waiting.launched
        assert self._token_log is not None
        outputs = self._token_log.outputs(fact)
        recorded = outputs.tokens if outputs is not None else None
        forced = recorded if self._is_forcing else None
        payload = waiting.payload
        if forced is not None:
            payload = structs.replace(payload, forced=forced)
        result = await self._workers.run(launched, waiting.body, payload)
        self.num_steps += 1
        identities = [SequenceId(row[0], row[1]) for row in (*launched.decodes, *launched.chunks)]
        positions = [self._requests.num_output_tokens(identity) for identity in identities]
        accepted = structs.replace(result, tokens=forced) if forced is not None else result
        again = self._requests.complete(fact.replica, accepted, start_ns=0, end_ns=0)
        self._step = ReExecutedStep(
            launched=launched,
            fact=fact,
            again=again,
            result=result,
            recorded=recorded,
            positions=positions,
            is_recorded_sound=recorded is None or self._requests.digest(recorded) == fact.digest,
            is_forced=forced is not None,
        )

    def _emit(self, emitted: Emitted) -> None:
        """The core's decision on which tokens of the step count."""
        if self._step is None:
            raise KeyError(emitted.step)
        self._judge({row for row, _ in emitted.dropped})
        self._requests.emit(emitted)

    def _judge(self, dropped: set[int]) -> None:
        step, self._step = self._step, None
        assert step is not None
        found = [mismatch for mismatch in self.comparison.compare(step, dropped) if not self._is_unseen(mismatch)]
        for mismatch in found:
            self._found(mismatch)
        if found and not step.is_forced:
            # The tokens with which the run continued are unknown.
            raise _Stopped

    def _found(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)
        if not self._is_forcing:
            raise _Stopped

    def _is_unseen(self, mismatch: Mismatch) -> bool:
        """Whether it lies after the end of the text, which was found later than the token was produced."""
        if mismatch.index < 0:
            return False
        if self._ends is None:
            self._ends = _ends(self._path)
        end = self._ends.get(SequenceId(mismatch.request, mismatch.index))
        return end is not None and mismatch.position >= end

    def _give_up(self, damage: str) -> NoReturn:
        self.finish()
        self.damage = damage
        raise _Stopped

    async def _lose(self, replica: int) -> None:
        self._requests.set_worker(replica, None)
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[0] != replica}
        await self._workers.lose(replica)


def _make_live(header: Header, digest_key: bytes) -> LiveRequests:
    """The requests of a run, none of which has arrived."""
    sets: list[ServedModel] = []
    num_replicas = 0
    for record in header.sets:
        core = record.core
        capacity = record.block_table_size or PAIRS_PER_BLOCK * core.blocks_per_replica
        names = BlockNames(secrets.token_bytes(32), block_size=core.block_size, capacity=capacity)
        sets.append(ServedModel(core.models, names, core.block_size, first_replica=num_replicas))
        num_replicas += core.num_replicas
    first, *others = sets
    return LiveRequests(first.names, block_size=first.block_size, seed_key=b"", digest_key=digest_key, others=others)


def _ends(path: Path | str) -> dict[SequenceId, int]:
    """The number of output tokens of each sequence that ended."""
    ends = {}
    with LogReader(path) as reader:
        for line in reader:
            if line.tag == "finish":
                event = line.event()
                assert isinstance(event, Finished)
                ends[SequenceId(event.request, event.index)] = event.position
    return ends


_TAGS = frozenset(
    [
        *("header", "gap", "arrive", "reject", "launch", "done", "emit", "closing", "finish"),
        *("worker_up", "worker_lost", "desync", "recovered"),
    ]
)
