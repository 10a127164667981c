"""The metrics of a whole trace: exact quantiles, which histograms cannot give, and what changed over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct, field

from eventlm.bus.log_reader import LogReader
from eventlm.events import Event, Header
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.histograms import HISTOGRAMS
from eventlm.metrics.rows import COMPLETED, Gauges, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.window_sums import WindowSums
from eventlm.types import OnProgress, TimeWindow

QUANTILES = (50, 90, 95, 99)
#: Taken of sequences that ran to their end.
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
#: Of those, what is taken of each service class too.
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
    by name.
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
    classes: dict[str, ClassValues] = {}

    @property
    def distributions(self) -> dict[str, Distribution]:
        """By metric; without those that have no value."""
        return {name: distribution(values) for name, values in self.values.items() if values}


class ClassValues(Struct, frozen=True, kw_only=True):
    """The CLASS_METRICS of one service class: values, and how often each occurred."""

    values: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in CLASS_METRICS})

    @property
    def distributions(self) -> dict[str, Distribution]:
        """By metric; without those that have no value."""
        return {name: distribution(values) for name, values in self.values.items() if values}


class _Keeper:
    """A sink that keeps what the report needs of each row."""

    def __init__(self, window: TimeWindow | None) -> None:
        self._window = window
        #: Of the window, once the header is known.
        self.sums: WindowSums | None = None
        self.values: dict[str, Counter[int]] = {name: Counter() for name in (*REQUEST_METRICS, *STEP_METRICS)}
        self.finish_reasons: Counter[str] = Counter()
        self.series: list[Series] = []
        self.classes: dict[str, ClassValues] = {}

    def request_ended(self, row: RequestRow) -> None:
        """Count and measure a sequence that has ended."""
        if not self.is_wanted(row):
            return
        if self.sums is not None:
            self.sums.request_ended(row)
        self.finish_reasons[row.reason] += 1
        self.measure(row)

    def is_wanted(self, row: RequestRow) -> bool:
        """Whether its request arrived in the window, if there is one."""
        return self._window is None or self._window.has(row.arrived_ns)

    def measure(self, row: RequestRow) -> None:
        """Keep the values of a sequence. Of one that was cut short, or is unfinished, only the first token counts."""
        of_class = self.classes.setdefault(row.service_class, ClassValues()).values if row.service_class else {}
        for name in REQUEST_METRICS if row.reason in COMPLETED else ("prefill_e2e_time",):
            value = getattr(row, name, None)
            if value is not None:
                self.values[name][value] += 1
                if name in of_class:
                    of_class[name][value] += 1

    def step_completed(self, row: StepRow) -> None:
        """Measure a step, and the times between its sequences' tokens."""
        if self._window is not None and not self._window.overlaps(row.started_ns, row.completed_ns):
            return
        if self.sums is not None:
            self.sums.step_completed(row)
        for name in STEP_METRICS[:4]:
            value = getattr(row, name)
            if value is not None:
                self.values[name][value] += 1
        self.values["predictor_error"][abs(row.predicted_ns - row.batch_execution_time)] += 1
        gaps = self.values["decode_token_execution_plus_preemption_time"]
        for gap_ns, num_rows in row.token_gaps:
            gaps[gap_ns] += num_rows
        series = self.series[row.replica]
        series.step_starts_ns.append(row.started_ns)
        series.step_ends_ns.append(row.completed_ns)
        series.batch_sizes.append(row.batch_size)

    def sample(self, now_ns: int, gauges: list[Gauges]) -> None:
        """Keep the gauges of those replicas where they have changed."""
        for series, of_replica in zip(self.series, gauges, strict=True):
            if not series.gauges or series.gauges[-1] != of_replica:
                series.gauges_ns.append(now_ns)
                series.gauges.append(of_replica)


class StatsCollector:
    """`see` every event of a run in order, the header first; then `stats`. With a window, they are of that part."""

    def __init__(self, window: TimeWindow | None = None) -> None:
        self._window = window
        self._keeper = _Keeper(window)
        self._store = MetricsStore(sink=self._keeper)
        self._header: Header | None = None
        self._now_ns = 0
        #: At the beginning of the window, and at its end.
        self._before: MetricsSnapshot | None = None
        self._after: MetricsSnapshot | None = None

    def see(self, event: Event) -> None:
        """Take in the next event."""
        if self._header is None and isinstance(event, Header):
            self._header, self._now_ns = event, event.ts
            self._keeper.series = [Series() for _ in range(event.core.num_replicas)]
            if self._window is not None:
                self._keeper.sums = WindowSums(event)
        if event.ts != self._now_ns:
            self._keeper.sample(self._now_ns, self._store.gauges)
            self._now_ns = event.ts
        if self._window is not None:
            self._see_window(self._window, event)
        self._store.apply(event)

    def _see_window(self, window: TimeWindow, event: Event) -> None:
        if self._keeper.sums is not None and window.has(event.ts):
            if self._before is None and not isinstance(event, Header):
                self._before = self._store.snapshot()
            self._keeper.sums.see(event)
        elif self._before is not None and self._after is None:
            self._after = self._store.snapshot()

    def stats(self, *, path: str, num_bytes: int, warnings: list[str]) -> TraceStats:
        """What they add up to, once, after the last of them. Raises ValueError if nothing was seen."""
        keeper = self._keeper
        if self._header is None:
            raise ValueError("there was no header")
        keeper.sample(self._now_ns, self._store.gauges)
        snapshot, begin_ns = self._store.snapshot(), self._header.ts
        if self._window is not None:
            snapshot, begin_ns = self._windowed(self._window, snapshot, self._header)
        unfinished = [row for row in self._store.unfinished() if keeper.is_wanted(row)]
        for row in unfinished:
            keeper.measure(row)
        return TraceStats(
            path=path,
            header=self._header,
            window=self._window,
            begin_ns=begin_ns,
            num_bytes=num_bytes,
            warnings=warnings,
            snapshot=snapshot,
            finish_reasons=_by_number(keeper.finish_reasons),
            reject_reasons=_by_number(_sum(replica.reject_reasons for replica in snapshot.replicas)),
            num_unfinished=len(unfinished),
            num_unfinished_with_token=sum(row.prefill_e2e_time is not None for row in unfinished),
            values=keeper.values,
            series=keeper.series,
            classes=dict(sorted(keeper.classes.items())),
        )

    def _windowed(self, window: TimeWindow, whole: MetricsSnapshot, header: Header) -> tuple[MetricsSnapshot, int]:
        """The snapshot of the window, and where it begins within the log."""
        assert self._keeper.sums is not None
        end_ns = header.ts + whole.duration_ns
        begin_ns = min(max(window.from_ns, header.ts), end_ns)
        end_ns = end_ns if window.to_ns is None else max(min(window.to_ns, end_ns), begin_ns)
        before, after = self._before or whole, self._after or whole
        return self._keeper.sums.snapshot(before, after, end_ns - begin_ns), begin_ns


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


def _sum(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


def _by_number(counts: Counter[str]) -> dict[str, int]:
    """Most first, then by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
