"""The metrics store's state of live sequences and of replicas. Its size is bounded by what is live.

Token times are kept for a step, not for each of its rows: sequences that were in a replica's latest step share its
time, and only those that join or leave between two steps are updated one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest
from operator import itemgetter
from typing import Literal, NamedTuple

from msgspec import Struct

from eventlm.config import CoreConfig
from eventlm.events import Launched, StepCompleted
from eventlm.metrics.aggregates import BackendMetrics, ReplicaMetrics
from eventlm.metrics.histograms import fields_of
from eventlm.metrics.rows import CANCELLED, UNFINISHED, RelayedTokens, RequestRow, StepRow
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import FinishReason

_identity_of = itemgetter(0, 1)

#: (request, index)
Identity = tuple[int, int]


class Phase(IntEnum):
    """Where a sequence is, by the log. Ending: closed, and the end of its text has not been reported yet."""

    WAITING = 0
    RUNNING = 1
    ENDING = 2


class LiveRequestMetrics(Struct, eq=False):
    """A request between its arrival and its last finish."""

    seq: int
    arrived_ns: int
    prompt_tokens: int
    n: int
    scheduling: SchedulingParams
    #: The number of the first replica of its replicaset, and whether that is made of other servers.
    first_replica: int = 0
    is_forwarded: bool = False
    num_unfinished: int = 0
    #: Of its samples that ran to their end; None before one has.
    max_output_tokens: int | None = None

    @property
    def received_ns(self) -> int:
        """Offline requests have no socket that could have received them."""
        return self.scheduling.received_ns or self.arrived_ns

    @property
    def generates(self) -> bool:
        """Whether it produces tokens: a forwarded embedding counts as one in the log, and is none."""
        return self.scheduling.kind == "generate"

    @property
    def is_branch(self) -> bool:
        """Whether another request counts in its place."""
        return self.scheduling.is_branch

    @property
    def deadline_ns(self) -> int:
        """From its arrival to its first token; 0 if it has none."""
        return self.scheduling.deadline_ns or self.scheduling.slo_ttft_ns


class LiveAttempt(Struct, eq=False):
    """A forwarded sequence at one server, until it fails, is withdrawn, or the sequence ends."""

    replica: int
    backend: BackendMetrics
    sent_ns: int
    is_hedge: bool = False
    has_answered: bool = False


class LiveSequenceMetrics(Struct, kw_only=True, eq=False):
    """A sequence between its admission and its finish. Times in ns, None before they came.

    home: the replica it belongs to, -1 for none yet. replica: where it was launched last, -1 before. next_position:
    where its next chunk begins unless more of it is hit. held_until_ns: when it gave its blocks back for good. table:
    its block table, as its replica's worker has it.

    Of a forwarded one: attempts: those under way, by their number. output_tokens: so far. reported_prompt_tokens,
    reported_cached_tokens: as the server counted them at the end.
    """

    request: LiveRequestMetrics
    identity: Identity
    waits_for_grammar: bool
    phase: Phase = Phase.WAITING
    home: int = -1
    replica: int = -1
    launched_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    held_until_ns: int | None = None
    preempted_ns: int | None = None
    preemption_ns: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0
    next_position: int = 0
    cached_tokens: int = 0
    table: list[int] = []
    attempts: dict[int, LiveAttempt] = {}
    output_tokens: int = 0
    reported_prompt_tokens: int | None = None
    reported_cached_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """As its server counts them, if it says."""
        reported = self.reported_prompt_tokens
        return self.request.prompt_tokens if reported is None else reported

    def end_attempts(self) -> None:
        """None is under way any more."""
        for attempt in self.attempts.values():
            attempt.backend.num_running -= 1
        self.attempts.clear()

    @property
    def counted_under(self) -> int:
        """The replica whose sums it belongs to; the first of its replicaset, if it belongs to none."""
        return next(number for number in (self.replica, self.home, self.request.first_replica) if number >= 0)


class Tokens(NamedTuple):
    """Gaps before a step's tokens, as (ns, rows), and the sequences whose first token it produced."""

    gaps: list[tuple[int, int]]
    first: list[LiveSequenceMetrics]


class TokenTimes:
    """When each sequence of a replica produced its last token."""

    def __init__(self) -> None:
        #: Rows of the latest step that produced tokens; None if a member has left since.
        self._rows: list[Identity] | None = None
        self._members: dict[Identity, LiveSequenceMetrics] = {}
        self._step_ns = 0

    def take(self, rows: list[Identity], sequences: Mapping[Identity, LiveSequenceMetrics], now_ns: int) -> Tokens:
        """Add the rows of a step that produced tokens. Rows of unknown sequences are ignored."""
        members, step_ns = self._members, self._step_ns
        self._step_ns = now_ns
        if rows == self._rows:
            return Tokens([(now_ns - step_ns, len(members))] if members else [], [])
        present = dict.fromkeys(rows)
        for identity in members.keys() - present.keys():
            members.pop(identity).last_token_ns = step_ns
        tokens = Tokens([(now_ns - step_ns, len(members))] if members else [], [])
        for identity in sorted(present.keys() - members.keys()):
            sequence = sequences.get(identity)
            if sequence is None:
                continue
            members[identity] = sequence
            if sequence.last_token_ns is None:
                tokens.first.append(sequence)
            else:
                tokens.gaps.append((now_ns - sequence.last_token_ns, 1))
        self._rows = rows
        return tokens

    def leave(self, identity: Identity) -> None:
        """A sequence takes no part in the next step, or does so elsewhere."""
        sequence = self._members.pop(identity, None)
        if sequence is not None:
            sequence.last_token_ns = self._step_ns
            self._rows = None

    def update_members(self) -> None:
        """Write the time of the last step into the sequences that were in it."""
        for sequence in self._members.values():
            sequence.last_token_ns = self._step_ns

    def leave_all(self) -> None:
        """The replica has lost its worker."""
        for identity in list(self._members):
            self.leave(identity)


class StageWaits:
    """How long the steps of a worker wait for the stages of its pipeline. It gets all of them in their order."""

    def __init__(self) -> None:
        #: When each stage ended its latest step.
        self._freed_ns: list[int] = []

    def take(self, stages: Sequence[tuple[int, int]]) -> list[int]:
        """How long the next step waited for each stage that computed another one; stages: when each had it."""
        if not stages:
            return []
        freed_ns, self._freed_ns = self._freed_ns, [end_ns for _, end_ns in stages]
        before_ns = [end_ns for _, end_ns in stages[:-1]]
        # Steps do not wait in front of the first stage, but in the scheduler.
        return [0] + [
            max(min(start_ns, free_ns) - there_ns, 0)
            for (start_ns, _), there_ns, free_ns in zip(stages[1:], before_ns, freed_ns[1:] or before_ns, strict=False)
        ]


class LiveReplica:
    """A replica: its sums, its launches that have not completed, and the references to its blocks."""

    def __init__(self, metrics: ReplicaMetrics, core: CoreConfig) -> None:
        self.metrics = metrics
        self.core = core
        #: Of several KV groups, the blocks of each; their numbers run across the groups.
        self._group_blocks = core.num_blocks if core.groups > 1 else 0
        self.epoch = 0
        self.launches: dict[int, Launched] = {}
        #: The completion whose `emit` is due, with its launch.
        self.completed: tuple[Launched, StepCompleted] | None = None
        #: When the latest step left room for the next one, by its worker and by the engine.
        self.last_freed_ns: int | None = None
        self.last_known_ns = 0
        self.stage_waits = StageWaits()
        self.token_times = TokenTimes()
        self._references: dict[int, int] = {}

    def end_step(self, launched: Launched, fact: StepCompleted) -> int | None:
        """How long the replica, of a pipeline its first stage, was idle before the step; None if nothing was to do."""
        delay_ns = None
        if self.last_freed_ns is not None and launched.ts <= self.last_known_ns:
            delay_ns = max(fact.start_ns - self.last_freed_ns, 0)
        # A launch that comes before a stage is free has been waited for; without stages it may come with the answer.
        self.last_freed_ns, self.last_known_ns = fact.freed_ns, fact.freed_ns if fact.stages else fact.ts
        return delay_ns

    def write_blocks(self, table: list[int], index: int, blocks: list[int]) -> None:
        """Put blocks at a place of a sequence's table, in place of any that are there."""
        self._release(table[index : index + len(blocks)])
        table[index : index + len(blocks)] = blocks
        references = self._references
        if self._group_blocks:
            self._count_in_groups((block for block in blocks if block not in references), 1)
        for block in blocks:
            references[block] = references.get(block, 0) + 1
        self.metrics.num_held_blocks = len(references)

    def release_table(self, table: list[int]) -> None:
        """A sequence gives all its blocks back."""
        self._release(table)
        table.clear()
        self.metrics.num_held_blocks = len(self._references)

    def _release(self, blocks: list[int]) -> None:
        references = self._references
        for block in blocks:
            if references[block] == 1:
                del references[block]
            else:
                references[block] -= 1
        if self._group_blocks:
            self._count_in_groups((block for block in blocks if block not in references), -1)

    def _count_in_groups(self, blocks: Iterable[int], change: int) -> None:
        for block in blocks:
            self.metrics.group_held_blocks[block // self._group_blocks] += change

    def lose_worker(self) -> None:
        """Steps in flight are gone. Resident sequences return their blocks with their `preempt` events."""
        self.launches.clear()
        self.completed = None
        self.last_freed_ns = None
        self.stage_waits = StageWaits()
        self.token_times.leave_all()


def producing_rows(launched: Launched, produced: list[int], dropped: list[tuple[int, int]]) -> list[Identity]:
    """The rows whose tokens count. If all decodes' do, as nearly always, they are not checked one by one."""
    num_decodes = len(launched.decodes)
    rows: list[Identity] = list(map(_identity_of, launched.decodes))
    gone = dict(dropped)
    if dropped or 0 in produced[:num_decodes]:
        rows = [identity for row, identity in enumerate(rows) if produced[row] > gone.get(row, 0)]
    for row, chunk in enumerate(launched.chunks, start=num_decodes):
        if produced[row] > gone.get(row, 0):
            rows.append((chunk[0], chunk[1]))
    return rows


def shown_tokens(launched: Launched, produced: list[int], dropped: list[tuple[int, int]]) -> list[Identity]:
    """The sequence of each token of a step that counts: like `producing_rows`, with a row once for each token."""
    gone = dict(dropped)
    return [
        (row[0], row[1])
        for index, row in enumerate([*launched.decodes, *launched.chunks])
        for _ in range(produced[index] - gone.get(index, 0))
    ]


def request_row(
    sequence: LiveSequenceMetrics,
    reason: FinishReason | Literal["unfinished"],
    now_ns: int,
    *,
    output_tokens: int,
    cached_tokens: int,
) -> RequestRow:
    """The row of a sequence that has just ended, or of an unfinished one as it is now."""
    request = sequence.request
    launched_ns, first_ns, last_ns = sequence.launched_ns, sequence.first_token_ns, sequence.last_token_ns
    held_until_ns = sequence.held_until_ns or now_ns
    preemption_ns = sequence.preemption_ns
    if sequence.preempted_ns is not None:
        preemption_ns += now_ns - sequence.preempted_ns
    per_token_ns = None
    if first_ns is not None and last_ns is not None and output_tokens > 1:
        per_token_ns = (last_ns - first_ns) // (output_tokens - 1)
    return RequestRow(
        request=request.seq,
        index=sequence.identity[1],
        replica=sequence.counted_under,
        reason=reason,
        arrived_ns=request.arrived_ns,
        finished_ns=now_ns,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        request_e2e_time=now_ns - request.received_ns,
        request_scheduling_delay=_between(request.arrived_ns, launched_ns),
        request_execution_time=_between(launched_ns, held_until_ns, less=preemption_ns),
        request_preemption_time=preemption_ns if launched_ns is not None else None,
        request_prefill_time=_between(launched_ns, first_ns),
        request_decode_time=_between(first_ns, last_ns),
        request_inference_time=_between(launched_ns, last_ns),
        request_time_per_output_token=per_token_ns,
        prefill_e2e_time=_between(request.received_ns, first_ns),
        request_num_preemptions=sequence.num_preemptions,
        request_num_restarts=sequence.num_restarts,
        is_branch=request.is_branch,
        service_class=request.scheduling.service_class,
        met_deadline=_met_deadline(sequence, reason, now_ns),
        met_slo=_met_slo(sequence, reason, now_ns, per_token_ns),
    )


def _prefilled_ns(sequence: LiveSequenceMetrics, reason: str, now_ns: int) -> int | None:
    """When a deadline was met: at its first token, or at its end if it was to produce none."""
    return now_ns if reason == "complete" else sequence.first_token_ns


def _met_deadline(sequence: LiveSequenceMetrics, reason: str, now_ns: int) -> bool | None:
    """Whether it met the request's own deadline. None also if it was cancelled, or the log ends, before that."""
    request = sequence.request
    if not request.scheduling.deadline_ns:
        return None
    due_ns = request.arrived_ns + request.scheduling.deadline_ns
    first_ns = _prefilled_ns(sequence, reason, now_ns)
    if first_ns is None:
        return None if reason in (*CANCELLED, UNFINISHED) and now_ns < due_ns else False
    return first_ns <= due_ns


def _met_slo(sequence: LiveSequenceMetrics, reason: str, now_ns: int, per_token_ns: int | None) -> bool | None:
    """Whether it met its request's objectives. None also if it is unfinished and may still meet them."""
    request, first_ns = sequence.request, _prefilled_ns(sequence, reason, now_ns)
    slo_ttft_ns, slo_tpot_ns = request.scheduling.slo_ttft_ns, request.scheduling.slo_tpot_ns
    if not slo_ttft_ns and not slo_tpot_ns:
        return None
    if reason == UNFINISHED:
        ttft_ns = (now_ns if first_ns is None else first_ns) - request.received_ns
        return False if slo_ttft_ns and ttft_ns > slo_ttft_ns else None
    if slo_ttft_ns and (first_ns is None or first_ns - request.received_ns > slo_ttft_ns):
        return False
    return not slo_tpot_ns or (per_token_ns or 0) <= slo_tpot_ns


def _between(start_ns: int | None, end_ns: int | None, *, less: int = 0) -> int | None:
    return None if start_ns is None or end_ns is None else end_ns - start_ns - less


_REQUEST_FIELDS, _STEP_FIELDS = fields_of("request"), fields_of("step")


def observe_request(row: RequestRow, metrics: ReplicaMetrics) -> None:
    """Add a sequence that ran to its end to its replica's histograms."""
    for name, key in _REQUEST_FIELDS:
        value = getattr(row, name)
        if value is not None:
            metrics.histograms[key].observe(value)


def observe_step(row: StepRow, metrics: ReplicaMetrics) -> None:
    """Add a step to its replica's histograms and sums."""
    metrics.num_steps += 1
    metrics.busy_ns += row.busy_ns
    for name, key in _STEP_FIELDS:
        value = getattr(row, name)
        if value is not None:
            metrics.histograms[key].observe(value)
    if row.stages:
        before_ns = [row.stages[0][0], *(end_ns for _, end_ns in row.stages)]
        exchanges_ns = [
            # Clocks of several hosts differ a little.
            max(start_ns - end_ns, 0) - wait_ns
            for (start_ns, _), end_ns, wait_ns in zip(row.stages, before_ns, row.stage_waits_ns, strict=False)
        ]
        metrics.stage_busy_ns = _added(metrics.stage_busy_ns, [end_ns - start_ns for start_ns, end_ns in row.stages])
        metrics.stage_wait_ns = _added(metrics.stage_wait_ns, row.stage_waits_ns)
        metrics.stage_exchange_ns = _added(metrics.stage_exchange_ns, exchanges_ns)
    if row.loads:
        metrics.group_tokens = _added(metrics.group_tokens, row.loads)
    for gap_ns, num_rows in row.token_gaps:
        metrics.histograms["decode_token_execution_plus_preemption_time"].observe(gap_ns, num_rows)


def observe_relayed(row: RelayedTokens, metrics: ReplicaMetrics) -> None:
    """Add tokens that another server sent to the sums of its replica."""
    metrics.generation_tokens += row.num_tokens
    if row.gap_ns is not None:
        metrics.histograms["decode_token_execution_plus_preemption_time"].observe(row.gap_ns)


def _added(sums: list[int], values: list[int]) -> list[int]:
    return [sum(each) for each in zip_longest(sums, values, fillvalue=0)]
