"""Limits on quantiles of latencies, and the highest load that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eventlm.config.plugin_spec import parse_parameters
from eventlm.errors import UsageError
from eventlm.replay.simulate.summary import SimulationSummary

METRICS = ("ttft", "tpot", "e2e")
QUANTILES = ("p50", "p90", "p95", "p99", "max")
#: A refinement ends when pass and miss are this close, in parts per million of the load.
MIN_GAP_PPM = 1000


class Limit(NamedTuple):
    """An upper limit on a quantile of a latency."""

    quantile: str
    metric: str
    limit_ms: float

    @property
    def name(self) -> str:
        """As in `--slo`."""
        return f"{self.quantile}_{self.metric}"

    def value_ms(self, summary: SimulationSummary) -> float | None:
        """The limited value; None if no sequence has this latency."""
        found = summary.latencies.get(self.metric)
        return None if found is None else getattr(found, self.quantile) / 1e6


class Capacity(NamedTuple):
    """load_ppm: the highest load that keeps the limits, as all lower ones do; None if the lowest does not.
    first_miss_ppm: the lowest load that does not; None if all do, so the capacity may be higher. Parts per million.
    """

    load_ppm: int | None
    first_miss_ppm: int | None


def parse_limits(text: str) -> list[Limit]:
    """`p99_ttft=2000,p50_tpot=50`, in milliseconds. Raises UsageError."""
    limits = []
    for name, value in parse_parameters(text, whole=f"--slo {text}").items():
        quantile, _, metric = name.partition("_")
        if quantile not in QUANTILES or metric not in METRICS:
            raise UsageError(
                f"--slo {text!r}: {name} is not a quantile of a latency; write one of {', '.join(QUANTILES)}, an "
                f"underscore and one of {', '.join(METRICS)}, such as p99_ttft=2000"
            )
        if isinstance(value, bool | str) or not value > 0:
            raise UsageError(f"--slo {text!r}: {name}={value} is not a number of milliseconds above 0")
        limits.append(Limit(quantile, metric, float(value)))
    return limits


def keeps(summary: SimulationSummary, limits: Sequence[Limit]) -> bool:
    """Whether all limits are kept and no request is rejected for a full queue.

    Requests that exceed the context length do not count.
    """
    if summary.reject_reasons.get("queue_full") or not summary.num_complete:
        return False
    return all((value := limit.value_ms(summary)) is None or value <= limit.limit_ms for limit in limits)


def capacity(kept: Mapping[int, bool]) -> Capacity:
    """The capacity, given whether each load (in parts per million) keeps the limits."""
    best = None
    for load_ppm in sorted(kept):
        if not kept[load_ppm]:
            return Capacity(best, load_ppm)
        best = load_ppm
    return Capacity(best, None)


def load_between(found: Capacity) -> int | None:
    """The load that would narrow the capacity down most; None if it is known closely enough."""
    if found.load_ppm is None or found.first_miss_ppm is None:
        return None
    gap_ppm = found.first_miss_ppm - found.load_ppm
    if gap_ppm * 1_000_000 <= found.load_ppm * MIN_GAP_PPM:
        return None
    return found.load_ppm + gap_ppm // 2
