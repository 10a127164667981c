"""PromQL of the families of /metrics. A name, a kind or a label that no family has is an error when files are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eventlm.metrics.families import FAMILIES
from eventlm.metrics.family import COUNTER, GAUGE, HISTOGRAM, SUMMARY, Family, Kind

#: Labels that Prometheus adds to every series.
TARGET_LABELS = ("job", "instance")

_BY_NAME = {family.name: family for family in FAMILIES}


class Queries(NamedTuple):
    """Expressions over series that match `selector` (`job="eventlm"`), and rates over `window` (`5m`).

    Every method takes a family by its name in /metrics, without `_total` or `_bucket`; `by`: labels that are kept;
    `where`: a further matcher. Raises ValueError for what the family does not have.
    """

    selector: str
    window: str

    def gauge(self, name: str, *, by: Sequence[str] = (), where: str = "", fold: str = "sum") -> str:
        """The sum, or another aggregation, of a gauge."""
        family = _find(name, GAUGE, by, where)
        return f"{fold} by ({', '.join(by)}) ({family.name}{self._matchers(where)})"

    def rate(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """A counter's increase in a second."""
        return self._change("rate", name, by, where)

    def increase(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """A counter's increase in the window."""
        return self._change("increase", name, by, where)

    def quantile(self, share: float, name: str, *, by: Sequence[str] = ()) -> str:
        """A quantile of a histogram."""
        family = _find(name, HISTOGRAM, by)
        labels = ", ".join(["le", *by])
        return (
            f"histogram_quantile({share:g}, sum by ({labels}) "
            f"(rate({family.name}_bucket{self._matchers()}[{self.window}])))"
        )

    def mean(self, name: str, *, by: Sequence[str] = ()) -> str:
        """The mean of a histogram's or a summary's values."""
        family = _find(name, (HISTOGRAM, SUMMARY), by)
        sums, counts = (
            f"sum by ({', '.join(by)}) (rate({family.name}_{part}{self._matchers()}[{self.window}]))"
            for part in ("sum", "count")
        )
        return f"{sums} / {counts}"

    def _change(self, function: str, name: str, by: Sequence[str], where: str) -> str:
        family = _find(name, COUNTER, by, where)
        return f"sum by ({', '.join(by)}) ({function}({family.name}_total{self._matchers(where)}[{self.window}]))"

    def _matchers(self, where: str = "") -> str:
        matchers = ", ".join(filter(None, (self.selector, where)))
        return f"{{{matchers}}}" if matchers else ""


def _find(name: str, kinds: Kind | tuple[Kind, ...], by: Sequence[str], where: str = "") -> Family:
    family = _BY_NAME.get(name)
    if family is None:
        raise ValueError(f"/metrics has no family {name!r}")
    if family.kind not in (kinds if isinstance(kinds, tuple) else (kinds,)):
        raise ValueError(f"{name} is another kind of family: {family.kind.__name__}")
    labels = {*by, *([where.partition("=")[0].rstrip("!")] if where else [])}
    if unknown := sorted(labels - {*family.labels, *TARGET_LABELS}):
        raise ValueError(f"{name} has no label {unknown[0]!r}")
    return family
