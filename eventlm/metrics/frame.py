"""A frame: what an engine did in an interval, and how it stands at the end of it.

It is the difference of two snapshots of the metrics store, so a frame of a running engine and one of its recording are
the same. Times are nanoseconds, rates are per second; a rate or a percentile without any data is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add, sub

from msgspec import Struct

from eventlm.events import Event
from eventlm.metrics.aggregates import BackendMetrics, ClassMetrics, MetricsSnapshot, ReplicaMetrics, SetOfReplicas
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.store import MetricsStore
from eventlm.types import NANOSECONDS_PER_SECOND


class Percentiles(Struct, frozen=True, kw_only=True):
    """Of the values that an interval added to a histogram: interpolated within a bucket, as Prometheus does it.

    A value above the last bound counts as that bound.
    """

    count: int
    mean: int | None = None
    p50: int | None = None
    p90: int | None = None
    p99: int | None = None


class StageFrame(Struct, frozen=True, kw_only=True):
    """One stage of a pipeline. wait_ns, exchange_ns: of a step, on average: for how long it waited for the stage while
    that had another one, and what it took besides to get there.
    """

    busy_percent: float | None
    wait_ns: int | None
    exchange_ns: int | None


class KvGroupFrame(Struct, frozen=True, kw_only=True):
    """One KV group: its blocks at the end, and the tokens that it computed."""

    num_held_blocks: int
    num_blocks: int
    tokens_per_s: float | None


class BackendFrame(Struct, frozen=True, kw_only=True):
    """Another server. Counts are of attempts and of the interval; gauges are as at the end, -1 where it does not say.

    num_running: that it has of ours; limit: how many it may have. failures: by kind. first_token_ns: since its attempt
    was sent. cached_percent: of the prompts that it answered.
    """

    name: str
    kind: str
    down_reason: str
    num_running: int
    limit: int
    reported_running: int
    reported_waiting: int
    reported_kv_ppm: int
    num_attempts: int
    num_answers: int
    num_withdrawn: int
    num_retries: int
    num_hedges: int
    num_hedges_won: int
    failures: dict[str, int]
    first_token_ns: Percentiles
    cached_percent: float | None


class ReplicaFrame(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica. Gauges are as at the end; busy_percent: time in steps that completed in the interval.

    Of several ranks only: ranks: how they are arranged, in words; stages, kv_groups: where there are several.
    forwards: it stands for another server, backend, if there is one.
    """

    is_up: bool
    num_running: int
    num_waiting: int
    num_held_blocks: int
    num_steps: int
    busy_percent: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    batch_size: Percentiles
    step_ns: Percentiles
    num_preemptions: int
    num_workers_lost: int
    ranks: str = ""
    stages: list[StageFrame] = []
    kv_groups: list[KvGroupFrame] = []
    forwards: bool = False
    backend: BackendFrame | None = None


class ClassFrame(Struct, frozen=True, kw_only=True):
    """One service class, over all replicas. Output tokens count when their sequence ends."""

    requests_per_s: float | None
    num_rejected: int
    num_complete: int
    num_deadlines_met: int
    num_deadlines_missed: int
    num_slo_met: int
    num_slo_missed: int
    output_tokens_per_s: float | None
    ttft_ns: Percentiles
    queue_ns: Percentiles


class Frame(Struct, frozen=True, kw_only=True):
    """All of an engine. Times are of the run's clock; gauges are as at the end; num_blocks: of all replicas.

    hit_percent: of the prompt tokens that were looked up in the prefix cache. finished, preempted and rejected: how
    many, by reason.
    """

    start_ns: int
    end_ns: int
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    ttft_ns: Percentiles
    inter_token_ns: Percentiles
    time_per_output_token_ns: Percentiles
    queue_ns: Percentiles
    e2e_ns: Percentiles
    num_running: int
    num_waiting: int
    num_waiting_for_grammar: int
    num_held_blocks: int
    num_blocks: int
    batch_size: Percentiles
    batch_tokens: Percentiles
    step_ns: Percentiles
    hit_percent: float | None
    finished: dict[str, int]
    preempted: dict[str, int]
    rejected: dict[str, int]
    num_deadlines_met: int
    num_deadlines_missed: int
    num_workers_lost: int
    num_plugin_failures: int
    replicas: list[ReplicaFrame]
    classes: dict[str, ClassFrame]


#: The sums of a class before its first request. They are only read.
_NO_CLASS = ClassMetrics()


def frame(before: MetricsSnapshot, after: MetricsSnapshot, *, start_ns: int, end_ns: int) -> Frame:
    """What happened between two snapshots of one store, taken at these times of the run's clock."""
    interval = _Interval(before.replicas, after.replicas, end_ns - start_ns)
    queried = interval.added("queried_tokens")
    return Frame(
        start_ns=start_ns,
        end_ns=end_ns,
        requests_per_s=interval.rate(after.num_requests - before.num_requests),
        prompt_tokens_per_s=interval.rate(interval.added("prompt_tokens")),
        generation_tokens_per_s=interval.rate(interval.added("generation_tokens")),
        ttft_ns=interval.percentiles("prefill_e2e_time"),
        inter_token_ns=interval.percentiles("decode_token_execution_plus_preemption_time"),
        time_per_output_token_ns=interval.percentiles("request_time_per_output_token"),
        queue_ns=interval.percentiles("request_scheduling_delay"),
        e2e_ns=interval.percentiles("request_e2e_time"),
        num_running=interval.gauge("num_running"),
        num_waiting=interval.gauge("num_waiting"),
        num_waiting_for_grammar=interval.gauge("num_waiting_for_grammar"),
        num_held_blocks=interval.gauge("num_held_blocks"),
        num_blocks=after.total_blocks,
        batch_size=interval.percentiles("batch_size"),
        batch_tokens=interval.percentiles("batch_num_tokens"),
        step_ns=interval.percentiles("batch_execution_time"),
        hit_percent=_percent(interval.added("hit_tokens"), queried),
        finished=interval.counts("finish_reasons"),
        preempted=interval.counts("preempt_reasons"),
        rejected=interval.counts("reject_reasons"),
        num_deadlines_met=interval.added("num_deadlines_met"),
        num_deadlines_missed=interval.added("num_deadlines_missed"),
        num_workers_lost=interval.added("num_workers_lost"),
        num_plugin_failures=after.num_plugin_failures - before.num_plugin_failures,
        replicas=[interval.replica(index, after.set_of(index)) for index in range(len(after.replicas))],
        classes={
            name: _class(before.classes.get(name, _NO_CLASS), each, interval) for name, each in after.classes.items()
        },
    )


def recorded_frames(events: Iterable[Event], times_ns: Sequence[int]) -> Iterator[Frame]:
    """The frames between each two of these ascending times of a run's clock. The first event is a header."""
    store = MetricsStore()
    before: MetricsSnapshot | None = None
    num_passed = 0

    def take() -> Iterator[Frame]:
        nonlocal before, num_passed
        after, end_ns = store.snapshot(), times_ns[num_passed]
        if before is not None:
            yield frame(before, after, start_ns=times_ns[num_passed - 1], end_ns=end_ns)
        before = after
        num_passed += 1

    for event in events:
        while num_passed < len(times_ns) and event.ts > times_ns[num_passed]:
            yield from take()
        store.apply(event)
    while num_passed < len(times_ns):
        yield from take()


class _Interval:
    """The sums of two snapshots, replica by replica; the earlier one has none if it was taken before the header."""

    def __init__(self, before: Sequence[ReplicaMetrics], after: Sequence[ReplicaMetrics], duration_ns: int) -> None:
        self._pairs = list(zip(before or [_nothing(each) for each in after], after, strict=True))
        self._duration_ns = duration_ns

    def of(self, index: int) -> _Interval:
        """That of one replica."""
        old, new = self._pairs[index]
        return _Interval([old], [new], self._duration_ns)

    def rate(self, count: int) -> float | None:
        """Per second."""
        return round(count * NANOSECONDS_PER_SECOND / self._duration_ns, 2) if self._duration_ns else None

    def added(self, name: str) -> int:
        """By how much a counter has grown."""
        return sum(getattr(new, name) - getattr(old, name) for old, new in self._pairs)

    def gauge(self, name: str) -> int:
        """The sum over the replicas at the end."""
        return sum(getattr(new, name) for _, new in self._pairs)

    def counts(self, name: str) -> dict[str, int]:
        """By how much each of several counters has grown, without those that have not."""
        return _grown((getattr(old, name), getattr(new, name)) for old, new in self._pairs)

    def percentiles(self, key: str) -> Percentiles:
        """Of what was added to a histogram."""
        return _percentiles([(old.histograms[key], new.histograms[key]) for old, new in self._pairs])

    def replica(self, index: int, of_set: SetOfReplicas) -> ReplicaFrame:
        """The frame of one replica."""
        own, (before, metrics) = self.of(index), self._pairs[index]
        backend = metrics.backend
        return ReplicaFrame(
            is_up=metrics.is_up,
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            num_held_blocks=metrics.num_held_blocks,
            num_steps=own.added("num_steps"),
            busy_percent=_percent(own.added("busy_ns"), self._duration_ns),
            prompt_tokens_per_s=self.rate(own.added("prompt_tokens")),
            generation_tokens_per_s=self.rate(own.added("generation_tokens")),
            batch_size=own.percentiles("batch_size"),
            step_ns=own.percentiles("batch_execution_time"),
            num_preemptions=sum(own.counts("preempt_reasons").values()),
            num_workers_lost=own.added("num_workers_lost"),
            ranks=of_set.layout.describe(),
            stages=own.stages(),
            kv_groups=own.kv_groups(of_set),
            forwards=of_set.forwards,
            backend=None if backend is None or backend.is_gone else _backend(backend.since(before.backend)),
        )

    def stages(self) -> list[StageFrame]:
        """Of one replica."""
        num_steps = self.added("num_steps")
        times = zip(*map(self.parts, ("stage_busy_ns", "stage_wait_ns", "stage_exchange_ns")), strict=True)
        return [
            StageFrame(
                busy_percent=_percent(busy_ns, self._duration_ns),
                wait_ns=wait_ns // num_steps if num_steps else None,
                exchange_ns=exchange_ns // num_steps if num_steps else None,
            )
            for busy_ns, wait_ns, exchange_ns in times
        ]

    def kv_groups(self, of_set: SetOfReplicas) -> list[KvGroupFrame]:
        """Of one replica."""
        ((_, metrics),) = self._pairs
        return [
            KvGroupFrame(
                num_held_blocks=num_held,
                num_blocks=of_set.num_blocks // of_set.layout.groups,
                tokens_per_s=self.rate(num_tokens),
            )
            for num_held, num_tokens in zip(metrics.group_held_blocks, self.parts("group_tokens"), strict=True)
        ]

    def parts(self, name: str) -> list[int]:
        """By how much each of a replica's stages or KV groups has grown."""
        ((old, new),) = self._pairs
        return list(map(sub, getattr(new, name), getattr(old, name)))


def _backend(added: BackendMetrics) -> BackendFrame:
    return BackendFrame(
        **{name: getattr(added, name) for name in _OF_BACKENDS},
        first_token_ns=_percentiles([(Histogram.over(added.first_token.bounds), added.first_token)]),
        cached_percent=_percent(added.cached_tokens, added.prompt_tokens),
    )


_OF_BACKENDS = [name for name in BackendFrame.__struct_fields__ if name in BackendMetrics.__struct_fields__]


def _nothing(metrics: ReplicaMetrics) -> ReplicaMetrics:
    """The sums of a replica before its first event."""
    stages, groups = [0] * len(metrics.stage_busy_ns), [0] * len(metrics.group_tokens)
    return ReplicaMetrics(
        histograms={key: Histogram.over(each.bounds) for key, each in metrics.histograms.items()},
        stage_busy_ns=stages,
        stage_wait_ns=stages,
        stage_exchange_ns=stages,
        group_tokens=groups,
    )


def _class(before: ClassMetrics, after: ClassMetrics, interval: _Interval) -> ClassFrame:
    def added(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    return ClassFrame(
        requests_per_s=interval.rate(added("num_requests")),
        num_rejected=sum(_grown([(before.reject_reasons, after.reject_reasons)]).values()),
        num_complete=added("num_complete"),
        num_deadlines_met=added("num_deadlines_met"),
        num_deadlines_missed=added("num_deadlines_missed"),
        num_slo_met=added("num_slo_met"),
        num_slo_missed=added("num_slo_missed"),
        output_tokens_per_s=interval.rate(added("output_tokens")),
        ttft_ns=_percentiles([(before.ttft, after.ttft)]),
        queue_ns=_percentiles([(before.queue, after.queue)]),
    )


def _grown(pairs: Iterable[tuple[Mapping[str, int], Mapping[str, int]]]) -> dict[str, int]:
    """The sums of the differences, in the order of the names, without zeros."""
    counts: Counter[str] = Counter()
    for old, new in pairs:
        counts.update(new)
        counts.subtract(old)
    return {name: count for name, count in sorted(counts.items()) if count}


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def _percentiles(pairs: Sequence[tuple[Histogram, Histogram]]) -> Percentiles:
    """Of what was added to several histograms with the same bounds."""
    if not pairs:
        return Percentiles(count=0)
    bounds = pairs[0][1].bounds
    counts = [0] * (len(bounds) + 1)
    total = 0
    for old, new in pairs:
        if new.counts != old.counts:
            counts = list(map(add, counts, map(sub, new.counts, old.counts)))
            total += new.total - old.total
    count = sum(counts)
    if not count:
        return Percentiles(count=0)
    p50, p90, p99 = (_percentile(bounds, counts, count, percent) for percent in (50, 90, 99))
    return Percentiles(count=count, mean=total // count, p50=p50, p90=p90, p99=p99)


def _percentile(bounds: Sequence[int], counts: Sequence[int], count: int, percent: int) -> int:
    below = 0
    for index, in_bucket in enumerate(counts[:-1]):
        if 100 * (below + in_bucket) >= percent * count:
            lower = bounds[index - 1] if index else min(0, bounds[0])
            rank = percent * count - 100 * below
            return lower + (bounds[index] - lower) * rank // (100 * in_bucket)
        below += in_bucket
    return bounds[-1]
