"""Pictures of a trace: how latencies are distributed, and what became of queue, batch and cache over time."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.pictures import add_grid, new_figure
from eventlm.errors import UsageError
from eventlm.metrics.rows import Gauges
from eventlm.metrics.trace_metrics import TraceStats
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
#: Beyond so many points a line shows the largest value of each interval.
MAX_POINTS = 1500
#: Over one decade more than this the axis of a CDF is logarithmic.
_LOG_RATIO = 20


def plot(stats: TraceStats, folder: str) -> Iterator[Path]:
    """Write the pictures, yielding the path of each. Raises UsageError if the folder cannot be written."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, metric, label in CDFS:
            if stats.values[metric]:
                draw = functools.partial(_cdf, values=stats.values[metric], label=label)
                yield _save(target / f"{name}.png", stats, draw)
        for name, gauge, label in GAUGES:
            draw = functools.partial(_gauge, stats=stats, gauge=gauge, label=label)
            yield _save(target / f"{name}.png", stats, draw)
        yield _save(target / "batch_size.png", stats, lambda axes: _batch_sizes(axes, stats))
        yield _save(target / "kv_usage.png", stats, lambda axes: _kv_usage(axes, stats))
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


def _gauge(axes: Axes, stats: TraceStats, gauge: Callable[[Gauges], int], label: str) -> None:
    lines = [([*series.gauges_ns], [gauge(each) for each in series.gauges]) for series in stats.series]
    _over_time(axes, stats, lines, label)


def _batch_sizes(axes: Axes, stats: TraceStats) -> None:
    lines = [(series.steps_ns, series.batch_sizes) for series in stats.series]
    _over_time(axes, stats, lines, "sequences in a step")


def _kv_usage(axes: Axes, stats: TraceStats) -> None:
    percent = 100 / max(stats.snapshot.num_blocks, 1)
    lines = [
        ([*series.gauges_ns], [each.num_held_blocks * percent for each in series.gauges]) for series in stats.series
    ]
    _over_time(axes, stats, lines, "KV blocks in use, %")


def _over_time(axes: Axes, stats: TraceStats, lines: list[tuple[list[int], list[Any]]], label: str) -> None:
    """One line a replica, in steps: a value holds until the next."""
    end_ns = stats.snapshot.duration_ns
    for index, (times_ns, values) in enumerate(lines):
        if not times_ns:
            continue
        times_ns, values = _largest_of_intervals([*times_ns, end_ns], [*values, values[-1]], end_ns)
        axes.plot(
            [ns / NANOSECONDS_PER_SECOND for ns in times_ns],
            values,
            drawstyle="steps-post",
            linewidth=1.2,
            alpha=0.85,
            label=f"replica {index}",
        )
    if len(lines) > 1:
        # Above the axes, where no line runs.
        axes.legend(frameon=False, fontsize=8, ncols=min(len(lines), 4), loc="lower right", bbox_to_anchor=(1, 1))
    axes.set_xlim(0, end_ns / NANOSECONDS_PER_SECOND or 1)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)
    axes.set_xlabel("time since the start of the run, s")
    axes.set_ylabel(label)


def _largest_of_intervals(times_ns: list[int], values: list[Any], end_ns: int) -> tuple[list[int], list[Any]]:
    """At most MAX_POINTS points, each the largest value of its interval; as they are where they are fewer."""
    if len(times_ns) <= MAX_POINTS:
        return times_ns, values
    width_ns = end_ns // MAX_POINTS + 1
    largest: dict[int, Any] = {}
    for ns, value in zip(times_ns, values, strict=True):
        place = ns // width_ns
        largest[place] = max(largest.get(place, value), value)
    return [place * width_ns for place in largest], list(largest.values())
