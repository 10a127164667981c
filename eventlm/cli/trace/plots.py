"""Pictures of a trace: the distribution of latencies, and queue, batch and cache over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, num2date
from matplotlib.figure import Figure

from eventlm.metrics.rows import Gauges
from eventlm.metrics.trace_metrics import Series, TraceStats
from eventlm.pictures import GREY, draw_cdfs, new_axes, quantile_ms, save_pictures
from eventlm.types import NANOSECONDS_PER_SECOND

#: File name, metric, label of the axis.
CDFS = (
    ("ttft_cdf", "prefill_e2e_time", "time to first token"),
    ("tbt_cdf", "decode_token_execution_plus_preemption_time", "time between tokens"),
    ("e2e_cdf", "request_e2e_time", "end-to-end time"),
    ("scheduling_delay_cdf", "request_scheduling_delay", "scheduling delay"),
)
#: A line of more points shows the largest value of each interval.
MAX_POINTS = 1500
#: For spans of more than so many seconds, the format of the ticks.
_TICKS = ((2 * 86_400, "%m-%d %H:%M"), (1200, "%H:%M"), (5, "%H:%M:%S"))


def plot(stats: TraceStats, folder: str, *, in_clock_time: bool = True) -> Iterator[Path]:
    """Write the pictures, yielding the path of each. Raises UsageError if the folder cannot be written.

    in_clock_time: False for a run that was simulated, whose times are no times of day.
    """
    draws: dict[str, Callable[[Axes], None]] = {
        name: partial(_cdf, values=stats.values[metric], label=label)
        for name, metric, label in CDFS
        if stats.values[metric]
    }
    percent = 100 / max(stats.snapshot.num_blocks, 1)
    for name, gauge, label in (
        ("waiting", lambda gauges: gauges.num_waiting, "sequences waiting"),
        ("running", lambda gauges: gauges.num_running, "sequences running"),
        ("batch_size", None, "sequences in a step (0: idle)"),
        ("kv_usage", lambda gauges: gauges.num_held_blocks * percent, "KV blocks in use, %"),
    ):
        lines = _batch_lines(stats) if gauge is None else _gauge_lines(stats, gauge)
        draws[name] = partial(_over_time, stats=stats, lines=lines, label=label, in_clock_time=in_clock_time)
    title = f"{stats.snapshot.model}, run {stats.header.run}"
    return save_pictures(folder, title, [(name, _in_axes(draw)) for name, draw in draws.items()])


def _in_axes(draw: Callable[[Axes], None]) -> Callable[[Figure], None]:
    return lambda figure: draw(new_axes(figure))


def _cdf(axes: Axes, values: Counter[int], label: str) -> None:
    draw_cdfs(axes, [(values, {"linewidth": 1.8})], label)
    for percent, height in ((50, 0.06), (99, 0.02)):
        x = quantile_ms(values, percent / 100)
        axes.axvline(x, color="0.6", linewidth=0.9, linestyle=":")
        # On the side with more room.
        shift, side = (-3, "right") if x > quantile_ms(values, 1) / 2 else (3, "left")
        axes.annotate(
            f"p{percent} {x:,.1f} ms", (x, height), xytext=(shift, 0), textcoords="offset points", ha=side, fontsize=8,
            color=GREY,
        )  # fmt: skip
    axes.set_ylabel(f"share of {values.total():,}")


class _Line(NamedTuple):
    """A replica over time: each value holds from its time (ns of the run, ascending) until the next."""

    times_ns: list[int]
    values: list[Any]


def _gauge_lines(stats: TraceStats, gauge: Callable[[Gauges], float]) -> list[_Line]:
    return [_Line([*series.gauges_ns], [gauge(each) for each in series.gauges]) for series in stats.series]


def _batch_lines(stats: TraceStats) -> list[_Line]:
    # A shorter pause could not be seen, and many of them would fill the area under the line.
    min_idle_ns = stats.snapshot.duration_ns // MAX_POINTS
    return [_batch_line(series, stats.begin_ns, min_idle_ns) for series in stats.series]


def _batch_line(series: Series, begin_ns: int, min_idle_ns: int) -> _Line:
    """The batch of each step from its start on, and 0 where no step runs for longer than `min_idle_ns`."""
    line = _Line([begin_ns], [0])
    idle_since_ns = begin_ns
    for start_ns, end_ns, size in zip(series.step_starts_ns, series.step_ends_ns, series.batch_sizes, strict=True):
        if start_ns - idle_since_ns > min_idle_ns:
            line.times_ns.append(idle_since_ns)
            line.values.append(0)
        line.times_ns.append(max(start_ns, line.times_ns[-1]))
        line.values.append(size)
        idle_since_ns = max(end_ns, idle_since_ns)
    line.times_ns.append(idle_since_ns)
    line.values.append(0)
    return line


def _over_time(axes: Axes, stats: TraceStats, lines: list[_Line], label: str, *, in_clock_time: bool) -> None:
    begin_ns, end_ns = stats.begin_ns, stats.begin_ns + stats.snapshot.duration_ns
    unix_start_ns = int(stats.header.unix_start_ns) if in_clock_time else 0

    def to_x(times_ns: list[int]) -> Any:
        if unix_start_ns > 0:
            return numpy.array([unix_start_ns + ns for ns in times_ns], dtype="datetime64[ns]")
        return [ns / NANOSECONDS_PER_SECOND for ns in times_ns]

    for index, line in enumerate(lines):
        if not line.times_ns:
            continue
        times_ns, values = _largest_of_intervals(_between(line, begin_ns, end_ns), begin_ns, end_ns)
        axes.plot(to_x(times_ns), values, drawstyle="steps-post", linewidth=1.2, alpha=0.85, label=f"replica {index}")
    if len(lines) > 1:
        # Above the axes, where no line runs.
        axes.legend(frameon=False, fontsize=8, ncols=min(len(lines), 4), loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_xlim(*to_x([begin_ns, max(end_ns, begin_ns + 1_000_000)]))
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)
    if unix_start_ns > 0:
        _label_time_of_day(axes, unix_start_ns + begin_ns, unix_start_ns + end_ns)
    else:
        axes.set_xlabel("time since the start of the run, s")
    axes.set_ylabel(label)


def _label_time_of_day(axes: Axes, begin_ns: int, end_ns: int) -> None:
    """Ticks at times of day as exact as the span (unix time) needs, and the date beside them."""
    seconds = (end_ns - begin_ns) / NANOSECONDS_PER_SECOND
    form = next((form for limit, form in _TICKS if seconds > limit), "")

    def tick(x: float, _: float) -> str:
        moment = num2date(x, tz=UTC)  # type: ignore[no-untyped-call]
        return str(moment.strftime(form) if form else f"{moment:%H:%M:%S.%f}".rstrip("0").rstrip("."))

    locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(tick)
    days = [f"{datetime.fromtimestamp(ns / NANOSECONDS_PER_SECOND, UTC):%Y-%m-%d}" for ns in (begin_ns, end_ns)]
    axes.set_xlabel(f"time of day (UTC), {' to '.join(dict.fromkeys(days))}")


def _between(line: _Line, begin_ns: int, end_ns: int) -> _Line:
    """The part between two times, from the value that holds at the first to the one that holds at the second."""
    first = max(bisect_right(line.times_ns, begin_ns) - 1, 0)
    last = max(bisect_right(line.times_ns, end_ns), first + 1)
    times_ns = [max(line.times_ns[first], begin_ns), *line.times_ns[first + 1 : last], end_ns]
    values = line.values[first:last]
    return _Line(times_ns, [*values, values[-1]])


def _largest_of_intervals(line: _Line, begin_ns: int, end_ns: int) -> _Line:
    """At most MAX_POINTS intervals, each with the largest value that held in it; a shorter line as it is."""
    if len(line.times_ns) <= MAX_POINTS:
        return line
    edges_ns = numpy.arange(begin_ns, end_ns + 1, (end_ns - begin_ns) // MAX_POINTS + 1)
    firsts = numpy.maximum(numpy.searchsorted(line.times_ns, edges_ns, side="right") - 1, 0)
    ends = [*numpy.searchsorted(line.times_ns, edges_ns[1:]), len(line.times_ns)]
    # One more value: `reduceat` takes no end after the last one.
    largest = numpy.maximum.reduceat([*line.values, 0], numpy.column_stack([firsts, ends]).ravel())[::2]
    return _Line(edges_ns.tolist(), largest.tolist())
