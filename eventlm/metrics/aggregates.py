"""The sums of the metrics store: histograms, counters and gauges, one set for each replica. Integers only.

Times are nanoseconds. `histograms` and `families` declare how /metrics shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

from msgspec import Struct, field

from eventlm.config import CoreConfig
from eventlm.core.shards import Layout
from eventlm.events.forwarding import REMOVED
from eventlm.metrics.histograms import LATENCY, TTFT, Histogram, make_histograms


class _Sums(Struct, kw_only=True, gc=False):
    def copy(self) -> Self:
        """One that later events do not change."""
        return type(self)(**{name: _copied(getattr(self, name)) for name in self.__struct_fields__})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value.copy() if isinstance(value, Histogram | list | _Sums) else value


class BackendMetrics(_Sums, kw_only=True, gc=False):
    """Sums over one other server, for as long as the replica stands for it. Attempts are counted, not sequences.

    name: its address, empty where the log does not tell. down_reason: why it takes nothing more, as it went.
    num_running: attempts under way; limit: how many it may have, as of the last one. num_answers: those that ended
    well; num_withdrawn: those that another attempt of the sequence made needless, whose tokens nobody counted.
    num_hedges: second attempts beside a first one elsewhere; num_hedges_won: those of them that answered.
    num_retries: failures here after which the sequence was to be sent again.
    """

    name: str = ""
    kind: str = ""
    down_reason: str = ""
    num_running: int = 0
    limit: int = 0
    num_attempts: int = 0
    num_answers: int = 0
    num_withdrawn: int = 0
    num_retries: int = 0
    num_hedges: int = 0
    num_hedges_won: int = 0
    #: By kind.
    failures: dict[str, int] = field(default_factory=dict)
    #: As ReplicaMetrics has them.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    #: What its own metrics said last; -1: nothing.
    reported_running: int = -1
    reported_waiting: int = -1
    reported_kv_ppm: int = -1
    #: From the sending of an attempt to the first of its answer.
    first_token: Histogram = field(default_factory=lambda: Histogram.over(TTFT))

    @property
    def is_gone(self) -> bool:
        """Whether it was removed and has answered what it had."""
        return self.down_reason == REMOVED and not self.num_running

    def forget_reports(self) -> None:
        """What its own metrics said is not true any more."""
        self.reported_running = self.reported_waiting = self.reported_kv_ppm = -1

    def since(self, before: BackendMetrics | None) -> BackendMetrics:
        """What was added to an earlier copy, with gauges as they are; all of it if that is of another server."""
        added = self.copy()
        if before is not None and before.name == self.name:
            for name in _BACKEND_COUNTERS:
                setattr(added, name, getattr(self, name) - getattr(before, name))
            kinds = {kind: count - before.failures.get(kind, 0) for kind, count in self.failures.items()}
            added.failures = {kind: count for kind, count in kinds.items() if count}
            added.first_token = self.first_token.since(before.first_token)
        return added


_BACKEND_COUNTERS = (
    "num_attempts", "num_answers", "num_withdrawn", "num_retries", "num_hedges", "num_hedges_won", "prompt_tokens",
    "cached_tokens", "generation_tokens",
)  # fmt: skip


class ReplicaMetrics(_Sums, kw_only=True, gc=False):
    """Sums over one replica. Sequences are counted, not requests: each of a request's `n` samples is one.

    What no replica has yet (sequences in the shared queue, rejected requests) counts under the first of its set, so
    that a sum over replicas is right. backend: of a replica that is another server.
    """

    histograms: dict[str, Histogram]
    #: Gauges. Running is a sequence from its launch on; waiting for its grammar is part of waiting.
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    num_held_blocks: int = 0
    is_up: bool = False
    #: Prompt tokens of sequences whose prefill is done, those of them found in the cache, and tokens shown.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    #: Prompt tokens looked up in the prefix cache at a first admission, and those found.
    queried_tokens: int = 0
    hit_tokens: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_steps: int = 0
    busy_ns: int = 0
    num_workers_lost: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    preempt_reasons: dict[str, int] = field(default_factory=dict)
    reject_reasons: dict[str, int] = field(default_factory=dict)
    #: Nanoseconds by operation, with --profile-ops.
    op_ns: dict[str, int] = field(default_factory=dict)
    #: Of a pipeline, the time of each stage in steps, that of steps before it while it computed others, and that of
    #: steps on their way to it. Together they are the whole time of the steps.
    stage_busy_ns: list[int] = field(default_factory=list)
    stage_wait_ns: list[int] = field(default_factory=list)
    stage_exchange_ns: list[int] = field(default_factory=list)
    #: Of several KV groups, the tokens that each computed, and the blocks in use now. What a row takes in several of
    #: them counts in each.
    group_tokens: list[int] = field(default_factory=list)
    group_held_blocks: list[int] = field(default_factory=list)
    backend: BackendMetrics | None = None

    @classmethod
    def total(cls, parts: Sequence[ReplicaMetrics]) -> ReplicaMetrics:
        """The sums of several replicas of one set, which is up if one of them is; of no backend."""
        names = [name for name in cls.__struct_fields__ if name != "backend"]
        return cls(**{name: _total([getattr(each, name) for each in parts]) for name in names})

    @classmethod
    def of(cls, core: CoreConfig) -> ReplicaMetrics:
        """Those of a replica to which nothing has happened."""
        stages, groups = core.num_stages or 0, core.num_kv_groups or 0
        return cls(
            histograms=make_histograms(core.max_model_len),
            stage_busy_ns=[0] * stages,
            stage_wait_ns=[0] * stages,
            stage_exchange_ns=[0] * stages,
            group_tokens=[0] * groups,
            group_held_blocks=[0] * groups,
        )


def _total(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: _total([each[key] for each in values if key in each]) for key in keys}
    if isinstance(first, Histogram):
        counts = [sum(column) for column in zip(*(each.counts for each in values), strict=True)]
        return Histogram(first.bounds, counts, sum(each.total for each in values))
    if isinstance(first, list):
        return [sum(column) for column in zip(*values, strict=True)]
    return any(values) if isinstance(first, bool) else sum(values)


class ClassMetrics(_Sums, kw_only=True, gc=False):
    """Sums over one class. It counts sequences, except in `num_requests` and `reject_reasons`.

    Deadlines are those of the requests themselves. Rejected sequences have missed them and their objectives. One that
    was cut short, or cancelled before its first token, has missed its objectives; one that was cancelled later is
    judged by what it got.
    """

    num_requests: int = 0
    reject_reasons: dict[str, int] = field(default_factory=dict)
    num_complete: int = 0
    #: Ended because they were late.
    num_dropped: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_slo_met: int = 0
    num_slo_missed: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram.over(TTFT))
    queue: Histogram = field(default_factory=lambda: Histogram.over(LATENCY))
    e2e: Histogram = field(default_factory=lambda: Histogram.over(LATENCY))


class SetOfReplicas(Struct, frozen=True):
    """The model that replicas from number `first` on serve, and the KV blocks and ranks that each of them has.

    forwards: they are other servers, and their blocks are not known.
    """

    first: int
    model: str
    num_blocks: int
    layout: Layout = Layout()
    forwards: bool = False


class MetricsSnapshot(Struct, frozen=True, kw_only=True, dict=True):
    """All sums of the store at one moment.

    duration_ns: what the log covers, which is less than the run if its first segments are not kept. num_unseen:
    sequences that ended and whose beginning is not in the log. num_cut: sequences that were live when
    the log lost events; nothing more is measured of them. model, num_blocks, layout, forwards: of the first
    replicaset; others: of the further ones.
    """

    model: str = ""
    num_blocks: int = 0
    layout: Layout = Layout()
    forwards: bool = False
    num_events: int = 0
    duration_ns: int = 0
    num_requests: int = 0
    num_unseen: int = 0
    num_cut: int = 0
    num_plugin_failures: int = 0
    replicas: list[ReplicaMetrics] = []
    #: By name, in its order.
    classes: dict[str, ClassMetrics] = {}
    others: list[SetOfReplicas] = []

    def set_of(self, replica: int) -> SetOfReplicas:
        """Of the replicaset of a replica."""
        for each in reversed(self.others):
            if replica >= each.first:
                return each
        return SetOfReplicas(0, self.model, self.num_blocks, self.layout, self.forwards)

    def by_set(self) -> Iterator[tuple[SetOfReplicas, list[ReplicaMetrics]]]:
        """Each replicaset with its replicas; none before the start."""
        sets = [self.set_of(0), *self.others] if self.replicas else []
        for of_set, last in zip(sets, [*(each.first for each in self.others), len(self.replicas)], strict=False):
            yield of_set, self.replicas[of_set.first : last]

    @cached_property
    def engines(self) -> list[tuple[SetOfReplicas, int, ReplicaMetrics]]:
        """The replicas with workers, and of each set of other servers the sums, by the number of the first replica."""
        found = []
        for of_set, replicas in self.by_set():
            own = [ReplicaMetrics.total(replicas)] if of_set.forwards else replicas
            found += [(of_set, index, each) for index, each in enumerate(own, start=of_set.first)]
        return found

    @property
    def total_blocks(self) -> int:
        """KV blocks of all replicas that have workers."""
        sets = map(self.set_of, range(len(self.replicas)))
        return sum(each.num_blocks for each in sets if not each.forwards)
