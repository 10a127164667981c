"""Pictures of a trace: the distribution of latencies, and queue, batch and cache over time."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.cli.pictures import add_grid, new_figure
from eventlm.errors import UsageError
from eventlm.metrics.rows import Gauges
from eventlm.metrics.trace_metrics import Series, TraceStats
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: File name, metric, what the axis says.
CDFS = (
    ("ttft_cdf", "prefill_e2e_time", "time to first token"),
    ("tbt_cdf", "decode_token_execution_plus_preemption_time", "time between tokens"),
    ("e2e_cdf", "request_e2e_time", "end-to-end time"),
    ("scheduling_delay_cdf", "request_scheduling_delay", "scheduling delay"),
)
#: File name, gauge, what the axis says.
GAUGES: tuple[tuple[str, Callable[[Gauges], int], str], ...] = (
    ("waiting", lambda gauges: gauges.num_waiting, "sequences waiting"),
    ("running", lambda gauges: gauges.num_running, "sequences running"),
)
#: A line of more points shows the largest value of each interval.
MAX_POINTS = 1500
#: For spans of more than so many seconds, the format of the ticks.
_TICKS = ((2 * 86_400, "%m-%d %H:%M"), (1200, "%H:%M"), (5, "%H:%M:%S"))
#: Over one decade more than this the axis of a CDF is logarithmic.
_LOG_RATIO = 20


def plot(stats: TraceStats, folder: str, *, in_clock_time: bool = True) -> Iterator[Path]:
    """Write the pictures, yielding the path of each. Raises UsageError if the folder cannot be written.

    in_clock_time: False for a run that was simulated, whose times are no times of day.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, metric, label in CDFS:
            if stats.values[metric]:
                draw = functools.partial(_cdf, values=stats.values[metric], label=label)
                yield _save(target / f"{name}.png", stats, draw)
        for name, gauge, label in GAUGES:
            draw = functools.partial(_gauge, stats=stats, gauge=gauge, label=label, in_clock_time=in_clock_time)
            yield _save(target / f"{name}.png", stats, draw)
        for name, draw_line in (("batch_size", _batch_sizes), ("kv_usage", _kv_usage)):
            draw = functools.partial(draw_line, stats=stats, in_clock_time=in_clock_time)
            yield _save(target / f"{name}.png", stats, draw)
    except OSError as error:
        raise UsageError(f"cannot write pictures to {folder}: {error.strerror}; choose another folder") from error


def _save(path: Path, stats: TraceStats, draw: Callable[[Axes], Any]) -> Path:
    figure = new_figure()
    axes = figure.add_subplot()
    add_grid(axes)
    draw(axes)
    axes.set_title(f"{stats.snapshot.model}, run {stats.header.run}", loc="left", fontsize=9, color="0.35")
    figure.savefig(path)
    return path


def _cdf(axes: Axes, values: Counter[int], label: str) -> None:
    ordered = sorted(values)
    count = sum(values.values())
    shares, num_below = [], 0
    for value in ordered:
        num_below += values[value]
        shares.append(num_below / count)
    xs = [value / NANOSECONDS_PER_MILLISECOND for value in ordered]
    axes.plot([xs[0], *xs], [0.0, *shares], drawstyle="steps-post", linewidth=1.8)
    median = next(x for x, share in zip(xs, shares, strict=True) if share >= 0.5)
    if xs[0] > 0 and xs[-1] > _LOG_RATIO * median:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    for percent, height in ((50, 0.06), (99, 0.02)):
        x = next(x for x, share in zip(xs, shares, strict=True) if share >= percent / 100)
        axes.axvline(x, color="0.6", linewidth=0.9, linestyle=":")
        # On the side where there is room for it.
        shift, side = (-3, "right") if x > xs[-1] / 2 else (3, "left")
        axes.annotate(
            f"p{percent} {x:,.1f} ms",
            (x, height),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            fontsize=8,
            color="0.35",
        )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{label}, ms")
    axes.set_ylabel(f"share of {count:,}")


class _Line(NamedTuple):
    """A replica over time: each value holds from its time (ns of the run, ascending) until the next."""

    times_ns: list[int]
    values: list[Any]


def _gauge(axes: Axes, stats: TraceStats, gauge: Callable[[Gauges], int], label: str, *, in_clock_time: bool) -> None:
    lines = [_Line([*series.gauges_ns], [gauge(each) for each in series.gauges]) for series in stats.series]
    _over_time(axes, stats, lines, label, in_clock_time=in_clock_time)


def _batch_sizes(axes: Axes, stats: TraceStats, *, in_clock_time: bool) -> None:
    # A shorter pause could not be seen, and many of them would fill the area under the line.
    min_idle_ns = stats.snapshot.duration_ns // MAX_POINTS
    lines = [_batch_line(series, stats.begin_ns, min_idle_ns) for series in stats.series]
    _over_time(axes, stats, lines, "sequences in a step (0: idle)", in_clock_time=in_clock_time)


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


def _kv_usage(axes: Axes, stats: TraceStats, *, in_clock_time: bool) -> None:
    percent = 100 / max(stats.snapshot.num_blocks, 1)
    lines = [
        _Line([*series.gauges_ns], [each.num_held_blocks * percent for each in series.gauges])
        for series in stats.series
    ]
    _over_time(axes, stats, lines, "KV blocks in use, %", in_clock_time=in_clock_time)


def _over_time(axes: Axes, stats: TraceStats, lines: list[_Line], label: str, *, in_clock_time: bool) -> None:
    begin_ns, end_ns = stats.begin_ns, stats.begin_ns + stats.snapshot.duration_ns
    unix_start_ns = int(stats.header.unix_start_ns) if in_clock_time else 0
    to_x = _clock_time(unix_start_ns) if unix_start_ns > 0 else _seconds
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
    from matplotlib.dates import AutoDateLocator, num2date

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


def _seconds(times_ns: list[int]) -> Any:
    return [ns / NANOSECONDS_PER_SECOND for ns in times_ns]


def _clock_time(unix_start_ns: int) -> Callable[[list[int]], Any]:
    def to_x(times_ns: list[int]) -> Any:
        import numpy

        return numpy.array([unix_start_ns + ns for ns in times_ns], dtype="datetime64[ns]")

    return to_x


def _between(line: _Line, begin_ns: int, end_ns: int) -> _Line:
    """The part between two times, from the value that holds at the first to the one that holds at the second."""
    first = max(bisect_right(line.times_ns, begin_ns) - 1, 0)
    last = max(bisect_right(line.times_ns, end_ns), first + 1)
    times_ns = [max(line.times_ns[first], begin_ns), *line.times_ns[first + 1 : last], end_ns]
    values = line.values[first:last]
    return _Line(times_ns, [*values, values[-1]])


def _largest_of_intervals(line: _Line, begin_ns: int, end_ns: int) -> _Line:
    """At most about MAX_POINTS intervals, each with the largest value that held in it; a shorter line as it is."""
    if len(line.times_ns) <= MAX_POINTS:
        return line
    width_ns = (end_ns - begin_ns) // MAX_POINTS + 1
    found = _Line([], [])

    def add(place: int, value: Any) -> None:
        found.times_ns.append(begin_ns + place * width_ns)
        found.values.append(value)

    held, place, largest = line.values[0], (line.times_ns[0] - begin_ns) // width_ns, line.values[0]
    for ns, value in zip(line.times_ns, line.values, strict=True):
        place_now, since_ns = divmod(ns - begin_ns, width_ns)
        if place_now != place:
            add(place, largest)
            if place_now > place + 1:
                add(place + 1, held)
            place, largest = place_now, held if since_ns else value
        held = value
        largest = max(largest, value)
    add(place, largest)
    return found
