"""The metrics of a whole trace: exact quantiles, which histograms cannot give, and what changed over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from eventlm.bus.log_reader import LogReader
from eventlm.events import Event, Header
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.histograms import HISTOGRAMS
from eventlm.metrics.rows import Gauges, RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.window_sums import WindowSums
from eventlm.types import OnProgress, TimeWindow

QUANTILES = (50, 90, 95, 99)
#: Of sequences that ran to their end.
REQUEST_METRICS = (
    "request_e2e_time",
    "request_scheduling_delay",
    "request_execution_time",
    "request_preemption_time",
    "prefill_e2e_time",
    "decode_token_execution_plus_preemption_time",
    "request_time_per_output_token",
    "request_num_restarts",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
)
#: Those of them that are also measured for each service class, and for each replicaset if there are several.
CLASS_METRICS = ("prefill_e2e_time", "request_time_per_output_token", "request_scheduling_delay", "request_e2e_time")
STEP_METRICS = ("batch_size", "batch_num_tokens", "batch_execution_time", "inter_batch_delay", "predictor_error")
#: Every other metric is nanoseconds.
COUNTS = {"cached_tokens"} | (
    {family.field or family.key for family in HISTOGRAMS if not family.is_time} & {*REQUEST_METRICS, *STEP_METRICS}
)


class Distribution(Struct, frozen=True, kw_only=True):
    """Of `count` values. Quantiles are values that occurred: the smallest that so many percent do not exceed."""

    count: int
    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int


class Series(Struct, kw_only=True):
    """One replica over time: gauges whenever they changed, and its steps."""

    gauges_ns: list[int] = field(default_factory=list)
    gauges: list[Gauges] = field(default_factory=list)
    #: When each step began (by the worker) and completed, and the sequences in it.
    step_starts_ns: list[int] = field(default_factory=list)
    step_ends_ns: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)


class TraceStats(Struct, frozen=True, kw_only=True):
    """What a trace, or a window of it, adds up to. Times in ns; `begin_ns` is where in the run it begins.

    num_unfinished: sequences that had not ended where the log does; num_unfinished_with_token: those of them that had
    their first token. values: those of each metric and how often each occurred; `distributions` sums them up. classes:
    the distributions of CLASS_METRICS by service class; replicasets: the same by the name of the set, if there are
    several.
    """

    path: str
    header: Header
    window: TimeWindow | None
    begin_ns: int
    num_bytes: int
    warnings: list[str]
    snapshot: MetricsSnapshot
    finish_reasons: dict[str, int]
    reject_reasons: dict[str, int]
    num_unfinished: int
    num_unfinished_with_token: int
    values: dict[str, Counter[int]]
    series: list[Series]
    classes: dict[str, dict[str, Distribution]] = {}
    replicasets: dict[str, dict[str, Distribution]] = {}

    @property
    def distributions(self) -> dict[str, Distribution]:
        """By metric; without those that have no value."""
        return _distributions(self.values)


class StatsCollector:
    """`see` every event of a run in order, the header first; then `stats`. With a window, they cover that part."""

    def __init__(self, window: TimeWindow | None = None) -> None:
        self._window = window
        self._store = MetricsStore(sink=self)
        self._header: Header | None = None
        self._now_ns = 0
        #: Of a window: its own sums, and the store's at its beginning and at its end.
        self._sums: WindowSums | None = None
        self._before: MetricsSnapshot | None = None
        self._after: MetricsSnapshot | None = None
        self._values: dict[str, Counter[int]] = {name: Counter() for name in (*REQUEST_METRICS, *STEP_METRICS)}
        self._finish_reasons: Counter[str] = Counter()
        self._series: list[Series] = []
        self._classes: dict[str, dict[str, Counter[int]]] = {}
        #: Of several replicasets, in their order, and the name of each replica's.
        self._replicasets: dict[str, dict[str, Counter[int]]] = {}
        self._set_names: list[str] = []

    def see(self, event: Event) -> None:
        """Add the next event."""
        if self._header is None and isinstance(event, Header):
            self._header, self._now_ns = event, event.ts
            self._series = [Series() for _ in range(event.num_replicas)]
            if len(event.sets) > 1:
                self._replicasets = {each.name: _counters() for each in event.sets}
                self._set_names = [event.sets[number].name for number in event.sets_of_replicas()]
            if self._window is not None:
                self._sums = WindowSums(event)
        if event.ts != self._now_ns:
            self._sample_gauges()
            self._now_ns = event.ts
        if self._window is not None and self._sums is not None:
            if self._window.has(event.ts):
                if self._before is None and not isinstance(event, Header):
                    self._before = self._store.snapshot()
                self._sums.see(event)
            elif self._before is not None and self._after is None:
                self._after = self._store.snapshot()
        self._store.apply(event)

    def _sample_gauges(self) -> None:
        """Keep the gauges of those replicas where they have changed."""
        for series, of_replica in zip(self._series, self._store.gauges, strict=True):
            if not series.gauges or series.gauges[-1] != of_replica:
                series.gauges_ns.append(self._now_ns)
                series.gauges.append(of_replica)

    def request_ended(self, row: RequestRow) -> None:
        """Count and measure a sequence that has ended."""
        if not self._is_wanted(row):
            return
        if self._sums is not None:
            self._sums.request_ended(row)
        self._finish_reasons[row.reason] += 1
        self._measure(row)

    def _is_wanted(self, row: RequestRow) -> bool:
        """Whether it counts, and its request arrived in the window, if there is one."""
        return not row.is_branch and (self._window is None or self._window.has(row.arrived_ns))

    def _measure(self, row: RequestRow) -> None:
        """Keep the values of a sequence. Of one that was cut short, or is unfinished, only the first token counts."""
        parts: list[dict[str, Counter[int]]] = []
        if row.service_class:
            parts.append(self._classes.setdefault(row.service_class, _counters()))
        if self._set_names:
            parts.append(self._replicasets[self._set_names[row.replica]])
        for name in REQUEST_METRICS if row.is_complete else ("prefill_e2e_time",):
            value = getattr(row, name, None)
            if value is not None:
                self._values[name][value] += 1
                for part in parts:
                    if name in part:
                        part[name][value] += 1

    def step_completed(self, row: StepRow) -> None:
        """Measure a step, and the times between its sequences' tokens."""
        if self._window is not None and not self._window.overlaps(row.started_ns, row.completed_ns):
            return
        if self._sums is not None:
            self._sums.step_completed(row)
        for name in STEP_METRICS[:4]:
            value = getattr(row, name)
            if value is not None:
                self._values[name][value] += 1
        self._values["predictor_error"][abs(row.predicted_ns - row.busy_ns)] += 1
        gaps = self._values["decode_token_execution_plus_preemption_time"]
        for gap_ns, num_rows in row.token_gaps:
            gaps[gap_ns] += num_rows
        series = self._series[row.replica]
        series.step_starts_ns.append(row.started_ns)
        series.step_ends_ns.append(row.completed_ns)
        series.batch_sizes.append(row.batch_size)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Measure the time between a sequence's tokens."""
        if self._window is not None and not self._window.has(row.relayed_ns):
            return
        if self._sums is not None:
            self._sums.tokens_relayed(row)
        if row.gap_ns is not None:
            self._values["decode_token_execution_plus_preemption_time"][row.gap_ns] += 1

    def stats(self, *, path: str, num_bytes: int, warnings: list[str]) -> TraceStats:
        """What they add up to, once, after the last of them. Raises ValueError if there was no event."""
        if self._header is None:
            raise ValueError("there was no header")
        self._sample_gauges()
        snapshot, begin_ns = self._store.snapshot(), self._header.ts
        if self._window is not None and self._sums is not None:
            # Where the window begins and ends within the log.
            last_ns = self._header.ts + snapshot.duration_ns
            begin_ns = min(max(self._window.from_ns, self._header.ts), last_ns)
            to_ns = last_ns if self._window.to_ns is None else self._window.to_ns
            end_ns = max(min(to_ns, last_ns), begin_ns)
            snapshot = self._sums.snapshot(self._before or snapshot, self._after or snapshot, end_ns - begin_ns)
        unfinished = [row for row in self._store.unfinished() if self._is_wanted(row)]
        for row in unfinished:
            self._measure(row)
        rejected: Counter[str] = Counter()
        for replica in snapshot.replicas:
            rejected.update(replica.reject_reasons)
        return TraceStats(
            path=path,
            header=self._header,
            window=self._window,
            begin_ns=begin_ns,
            num_bytes=num_bytes,
            warnings=warnings,
            snapshot=snapshot,
            finish_reasons=_by_number(self._finish_reasons),
            reject_reasons=_by_number(rejected),
            num_unfinished=len(unfinished),
            num_unfinished_with_token=sum(row.prefill_e2e_time is not None for row in unfinished),
            values=self._values,
            series=self._series,
            classes={name: _distributions(values) for name, values in sorted(self._classes.items())},
            replicasets={name: _distributions(values) for name, values in self._replicasets.items()},
        )


def _counters() -> dict[str, Counter[int]]:
    return {name: Counter() for name in CLASS_METRICS}


def trace_stats(
    path: Path | str,
    *,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> TraceStats:
    """Read a whole trace, and measure it or a window of it. Raises as LogReader does."""
    collector = StatsCollector(window)
    with LogReader(path, strict=strict) as reader:
        reader.fold(collector.see, on_progress=on_progress)
        return collector.stats(path=reader.path, num_bytes=reader.position, warnings=reader.warnings())


def distribution(values: Mapping[int, int]) -> Distribution:
    """Of values and how often each occurred, at least one."""
    count = sum(values.values())
    ranks = [-(-count * percent // 100) for percent in QUANTILES]
    found: list[int] = []
    num_below = 0
    ordered = sorted(values)
    for value in ordered:
        num_below += values[value]
        while len(found) < len(ranks) and num_below >= ranks[len(found)]:
            found.append(value)
    p50, p90, p95, p99 = found
    mean = sum(value * times for value, times in values.items()) / count
    return Distribution(count=count, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


def _distributions(values: Mapping[str, Counter[int]]) -> dict[str, Distribution]:
    """By metric; without those that have no value."""
    return {name: distribution(found) for name, found in values.items() if found}


def _by_number(counts: Counter[str]) -> dict[str, int]:
    """Most first, then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
