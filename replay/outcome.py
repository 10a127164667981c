"""The outcome of a run, request by request: a fold over its events, recorded or simulated, by which runs are compared.

Times are those of the metrics store, from the reception of a request. All values are integers: nanoseconds, tokens,
parts per million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, structs

from eventlm.config.objectives import Objectives
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Arrived, Event, Finished, Header, Launched, Rejected
from eventlm.metrics.rows import CANCELLED, COMPLETED, RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.trace_metrics import Distribution, distribution
from eventlm.replay.fluidity import TokenArrivals, tokens_in_time
from eventlm.types import TimeWindow

#: Latencies of a sequence, and their fields of `SequenceOutcome`.
LATENCIES = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "e2e_ns", "queue": "queue_ns"}


class SequenceOutcome(Struct, frozen=True, kw_only=True):
    """A sequence that has ended. `request` is the seq of its arrival. Times in ns; None: not reached.

    met_deadline: of the request's own deadline for the first token; None: it has none, or was cancelled before it.
    met_objectives: of the request's own (its slo), else of the run's; None: there are none. tokens_in_time: see
    `eventlm.replay.fluidity`; None without objectives for TTFT and TPOT.
    """

    request: int
    index: int
    reason: str
    service_class: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    arrived_ns: int
    ended_ns: int
    e2e_ns: int
    ttft_ns: int | None
    tpot_ns: int | None
    queue_ns: int | None
    num_preemptions: int
    met_deadline: bool | None
    met_objectives: bool | None
    tokens_in_time: int | None
    replicaset: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end."""
        return self.reason in COMPLETED

    @property
    def was_left(self) -> bool:
        """Whether its client left after the first token."""
        return self.reason in CANCELLED and self.ttft_ns is not None


class Rejection(Struct, frozen=True, kw_only=True):
    """A request that was rejected. Each of its sequences counts as a miss."""

    prompt_tokens: int
    num_sequences: int
    has_deadline: bool
    has_objectives: bool
    service_class: str = ""
    replicaset: int = 0


class RunOutcome(Struct, frozen=True, kw_only=True):
    """A run. duration_ns: from the first arrival to the last end. `sequences` are in the order of their ends.

    reject_reasons: counts requests. busy_ns_of_replicas: by number, of all steps of the run. hit_tokens of
    queried_tokens: prompt tokens found in caches.
    """

    sequences: list[SequenceOutcome]
    rejections: list[Rejection]
    num_requests: int
    num_unfinished: int
    reject_reasons: dict[str, int]
    duration_ns: int
    num_steps: int
    busy_ns: int
    output_tokens: int
    num_preemptions: int
    hit_tokens: int
    queried_tokens: int
    busy_ns_of_replicas: list[int] = []

    def latency(self, name: str, sequences: Iterable[SequenceOutcome] | None = None) -> Distribution | None:
        """One of LATENCIES over `sequences`, by default all, as far as they ran to their end; None if none has it."""
        chosen = self.sequences if sequences is None else sequences
        field = LATENCIES[name]
        values = Counter(
            value for found in chosen if found.is_complete and (value := getattr(found, field)) is not None
        )
        return distribution(values) if values else None

    def of_class(self, service_class: str) -> RunOutcome:
        """The same run with only the sequences and rejections of one service class; counts remain those of all."""
        return structs.replace(
            self,
            sequences=[each for each in self.sequences if each.service_class == service_class],
            rejections=[each for each in self.rejections if each.service_class == service_class],
        )

    def of_replicaset(self, number: int) -> RunOutcome:
        """The same with only the sequences, rejections and output of one replicaset; other counts remain those of
        all.
        """
        sequences = [each for each in self.sequences if each.replicaset == number]
        return structs.replace(
            self,
            sequences=sequences,
            rejections=[each for each in self.rejections if each.replicaset == number],
            output_tokens=sum(each.output_tokens for each in sequences),
        )

    @property
    def deadlines_met_ppm(self) -> int | None:
        """Share of sequences that met their own deadline, of those that had one. Rejected ones missed it."""
        rejected = sum(each.num_sequences for each in self.rejections if each.has_deadline)
        return _share_ppm([found.met_deadline for found in self.sequences], num_missed=rejected)

    @property
    def objectives_met_ppm(self) -> int | None:
        """Share of sequences that met the objectives. Those that were rejected or cut short did not. If the client left
        after the first token, the tokens until then count.
        """
        rejected = sum(each.num_sequences for each in self.rejections if each.has_objectives)
        met = [found.met_objectives and (found.is_complete or found.was_left) for found in self.sequences]
        return _share_ppm(met, num_missed=rejected)

    @property
    def fluidity_ppm(self) -> int | None:
        """Share of tokens in time."""
        measured = [found for found in self.sequences if found.tokens_in_time is not None and found.is_complete]
        num_tokens = sum(found.output_tokens for found in measured)
        return sum(found.tokens_in_time or 0 for found in measured) * 1_000_000 // num_tokens if num_tokens else None

    @property
    def output_tokens_per_second(self) -> float:
        """Of all sequences, over the run's duration."""
        return self.output_tokens * 1e9 / self.duration_ns if self.duration_ns else 0.0

    @property
    def requests_per_second(self) -> float:
        """Sequences that ran to their end, over the run's duration."""
        num_complete = sum(found.is_complete for found in self.sequences)
        return num_complete * 1e9 / self.duration_ns if self.duration_ns else 0.0


def _share_ppm(met: Sequence[bool | None], *, num_missed: int) -> int | None:
    known = [each for each in met if each is not None]
    count = len(known) + num_missed
    return sum(known) * 1_000_000 // count if count else None


class OutcomeCollector:
    """Takes every event of a run in order, the header first; then `outcome`.

    objectives: for requests without their own. counts: selects requests by their arrivals; None: all. A selection has
    the steps between its first arrival and its last end.
    """

    def __init__(
        self, objectives: Objectives | None = None, *, counts: Callable[[Arrived], bool] | None = None
    ) -> None:
        self._objectives = objectives
        self._counts = counts
        self._store = MetricsStore(sink=self)
        #: From the first sequence with deadlines for tokens.
        self._token_times = TokenArrivals() if _have_token_deadlines(objectives) else None
        self._arrivals: dict[int, Arrived] = {}
        self._num_unended: dict[int, int] = {}
        self._num_requests = 0
        self._first_ns: int | None = None
        self._last_ns = 0
        self._sequences: list[SequenceOutcome] = []
        self._rejections: list[Rejection] = []
        self._times_ns: list[int] = []
        self._reject_reasons: Counter[str] = Counter()
        #: Sequences whose first tokens came before the events that are taken.
        self._begun: set[tuple[int, int]] = set()
        #: Of a selection: the steps, and the prompt tokens looked up in the cache and found there.
        self._steps: list[StepRow] = []
        self._queried_tokens = 0
        self._hit_tokens = 0

    def take_up(self, header: Header, taken: StateSnapshot, launches: Iterable[Launched]) -> None:
        """Begin in the middle of a run, between two of its drains. Requests that are live there count with the rest of
        their lives; deadlines and objectives only of those without a token. launches: of the steps in flight there.
        """
        self._store.take_up(header, taken, launches)
        for request in taken.requests:
            if self._arrives(request.arrival):
                self._num_unended[request.arrival.s] = len(request.sequences)
                self._begun.update(
                    (request.arrival.s, row.index)
                    for row in request.sequences
                    if row.num_tokens > request.arrival.prompt_tokens
                )
        self._first_ns = taken.now_ns

    def see(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Arrived):
            self._arrived(event)
        elif isinstance(event, Rejected):
            self._rejected(event)
        if self._token_times is not None:
            if isinstance(event, Finished):
                self._times_ns = self._token_times.take(event)
            self._token_times.see(event)
        self._store.apply(event)

    def _arrived(self, event: Arrived) -> None:
        if self._arrives(event) and self._first_ns is None:
            self._first_ns = event.ts

    def _arrives(self, event: Arrived) -> bool:
        """Whether the request counts."""
        if self._counts is not None and not self._counts(event):
            return False
        self._arrivals[event.s] = event
        self._num_unended[event.s] = event.n
        self._num_requests += 1
        if self._token_times is None and event.scheduling.slo_ttft_ns and event.scheduling.slo_tpot_ns:
            self._token_times = TokenArrivals()
        return True

    def _rejected(self, event: Rejected) -> None:
        arrival = self._arrivals.get(event.request)
        if arrival is None:
            # It lies in a gap, or is not selected.
            return
        self._reject_reasons[event.reason] += 1
        self._rejections.append(
            Rejection(
                prompt_tokens=arrival.prompt_tokens,
                num_sequences=arrival.n,
                has_deadline=arrival.scheduling.deadline_ns > 0,
                has_objectives=self._objectives_of(arrival) is not None,
                service_class=arrival.scheduling.service_class,
                replicaset=arrival.replicaset,
            )
        )
        self._forget(event.request)

    def request_ended(self, row: RequestRow) -> None:
        """Add a sequence that has ended."""
        arrival = self._arrivals.get(row.request)
        if arrival is None:
            return
        if row.request_scheduling_delay is not None and not arrival.scheduling.skip_cache_read:
            self._queried_tokens += row.prompt_tokens
            self._hit_tokens += row.cached_tokens
        has_begun = (row.request, row.index) in self._begun
        objectives = None if has_begun else self._objectives_of(arrival)
        ttft_ns, tpot_ns = row.prefill_e2e_time, row.request_time_per_output_token
        in_time = None
        if objectives is not None and objectives.ttft is not None and objectives.tpot is not None:
            in_time = tokens_in_time(
                self._times_ns,
                start_ns=arrival.scheduling.received_ns or arrival.ts,
                ttft_ns=round(objectives.ttft * 1e6),
                tpot_ns=round(objectives.tpot * 1e6),
            )
        met_objectives = None
        if objectives is not None:
            met_objectives = objectives.are_met_by(ttft_ns=ttft_ns, tpot_ns=tpot_ns, e2e_ns=row.request_e2e_time)
        self._sequences.append(
            SequenceOutcome(
                request=row.request,
                index=row.index,
                reason=row.reason,
                service_class=arrival.scheduling.service_class,
                replicaset=arrival.replicaset,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                cached_tokens=row.cached_tokens,
                arrived_ns=row.arrived_ns,
                ended_ns=row.finished_ns,
                e2e_ns=row.request_e2e_time,
                ttft_ns=ttft_ns,
                tpot_ns=tpot_ns,
                queue_ns=row.request_scheduling_delay,
                num_preemptions=row.request_num_preemptions,
                met_deadline=None if has_begun else row.met_deadline,
                met_objectives=met_objectives,
                tokens_in_time=in_time,
            )
        )
        self._last_ns = row.finished_ns
        self._num_unended[row.request] -= 1
        if not self._num_unended[row.request]:
            self._forget(row.request)

    def step_completed(self, row: StepRow) -> None:
        """Keep the step of a selection; otherwise the store has the sums."""
        if self._counts is not None:
            self._steps.append(row)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """The store has the sums."""

    def _forget(self, request: int) -> None:
        del self._arrivals[request], self._num_unended[request]

    def _objectives_of(self, arrival: Arrived) -> Objectives | None:
        if not arrival.scheduling.slo_ttft_ns and not arrival.scheduling.slo_tpot_ns:
            return self._objectives
        return Objectives(
            ttft=arrival.scheduling.slo_ttft_ns / 1e6 if arrival.scheduling.slo_ttft_ns else None,
            tpot=arrival.scheduling.slo_tpot_ns / 1e6 if arrival.scheduling.slo_tpot_ns else None,
        )

    def outcome(self) -> RunOutcome:
        """The outcome so far."""
        whole = self._whole()
        if self._counts is None:
            return whole
        span = TimeWindow(self._first_ns or 0, self._last_ns)
        steps = [row for row in self._steps if span.overlaps(row.started_ns, row.completed_ns)]
        return structs.replace(
            whole,
            num_steps=len(steps),
            busy_ns=sum(row.batch_execution_time for row in steps),
            output_tokens=sum(found.output_tokens for found in self._sequences),
            num_preemptions=sum(found.num_preemptions for found in self._sequences),
            hit_tokens=self._hit_tokens,
            queried_tokens=self._queried_tokens,
        )

    def _whole(self) -> RunOutcome:
        replicas = self._store.snapshot().replicas
        return RunOutcome(
            sequences=self._sequences,
            rejections=self._rejections,
            num_requests=self._num_requests,
            num_unfinished=len(self._arrivals),
            reject_reasons=dict(sorted(self._reject_reasons.items())),
            duration_ns=max(self._last_ns - (self._first_ns or 0), 0),
            num_steps=sum(replica.num_steps for replica in replicas),
            busy_ns=sum(replica.busy_ns for replica in replicas),
            output_tokens=sum(replica.generation_tokens for replica in replicas),
            num_preemptions=sum(sum(replica.preempt_reasons.values()) for replica in replicas),
            hit_tokens=sum(replica.hit_tokens for replica in replicas),
            queried_tokens=sum(replica.queried_tokens for replica in replicas),
            busy_ns_of_replicas=[replica.busy_ns for replica in replicas],
        )


def _have_token_deadlines(objectives: Objectives | None) -> bool:
    return objectives is not None and objectives.ttft is not None and objectives.tpot is not None
