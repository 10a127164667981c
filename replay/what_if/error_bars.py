"""Error bars: how far a simulated metric may be from what another engine would really have shown.

A bar is the sum of two parts. The error is the distance of the baseline from the record, where the truth is known. The
spread is how much the draws of unknown things differ, because the truth is like one more draw. Both can be small by
luck, for a quantile above all. So for a latency or a rate each is at least as large, relative to the value, as the
median over the metrics of its family and over all latencies and rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median, stdev
from typing import NamedTuple

#: The value of a metric; None if there is nothing to measure.
Value = float | int | None

#: Student's t for nine values in ten, by the number of draws. One draw has no spread.
STUDENT_T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}


class Measured(NamedTuple):
    """A metric of the record, and of each engine by draw: the baseline, the unpaced baseline or nothing, alternatives.

    family: metrics whose errors are judged together; "": on its own. is_relative: its error grows with its value.
    resolution: the smallest possible error, such as 1 for a count.
    """

    family: str
    is_relative: bool
    resolution: float
    recorded: Value
    engines: list[list[Value]]


def middle(draws: Sequence[Value]) -> Value:
    """The median over the draws."""
    found = sorted(value for value in draws if value is not None)
    return found[len(found) // 2] if found else None


def error_bars(metrics: Sequence[Measured]) -> list[list[float | None]]:
    """Half the widths of the bars, in the metric's own unit, by metric and engine; None: nothing to measure."""
    errors = [_error(metric) for metric in metrics]
    shares = _at_least_typical(
        metrics, [_share(error, each.recorded) for error, each in zip(errors, metrics, strict=True)]
    )
    bars: list[list[float | None]] = [[] for _ in metrics]
    for index in range(len(metrics[0].engines)):
        values = [middle(metric.engines[index]) for metric in metrics]
        spreads = [_spread(metric.engines[index]) for metric in metrics]
        spread_shares = _at_least_typical(metrics, [_share(*each) for each in zip(spreads, values, strict=True)])
        for number, (metric, value, error) in enumerate(zip(metrics, values, errors, strict=True)):
            if value is None or error is None:
                bars[number].append(None)
                continue
            base = middle(metric.engines[0]) or 0
            error = max(error, shares[number] * max(value, base))
            spread = max(spreads[number], spread_shares[number] * value)
            bars[number].append(max(error + spread, metric.resolution))
    return bars


def _error(metric: Measured) -> float | None:
    """How far the baseline or the unpaced baseline is from the record, whichever is farther."""
    baseline, unpaced = (middle(draws) for draws in metric.engines[:2])
    if metric.recorded is None or baseline is None:
        return None
    return max(abs(value - metric.recorded) for value in (baseline, unpaced) if value is not None)


def _spread(draws: Sequence[Value]) -> float:
    """Half the width of an interval around the draws that holds a further one nine times in ten."""
    found = [value for value in draws if value is not None]
    return STUDENT_T[len(found)] * stdev(found) * sqrt(1 + 1 / len(found)) if len(found) > 1 else 0.0


def _share(part: float | None, whole: Value) -> float | None:
    return None if part is None or whole is None else part / whole if whole else 0.0


def _at_least_typical(metrics: Sequence[Measured], shares: Sequence[float | None]) -> list[float]:
    """The shares of relative metrics, or the medians over their family and over all if they are larger; 0 of others."""
    of_families: dict[str, list[float]] = {}
    of_all: list[float] = []
    for metric, share in zip(metrics, shares, strict=True):
        if metric.is_relative and share is not None:
            of_families.setdefault(metric.family, []).append(share)
            of_all.append(share)
    return [
        max(share, median(of_families[metric.family]), median(of_all))
        if metric.is_relative and share is not None
        else 0.0
        for metric, share in zip(metrics, shares, strict=True)
    ]
