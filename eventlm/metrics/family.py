"""What a family of /metrics is: a name with its kind, help and labels, and where its samples come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from eventlm.metrics.components import EngineMetrics
from eventlm.types import NANOSECONDS_PER_SECOND

GAUGE, COUNTER, HISTOGRAM, SUMMARY = (
    GaugeMetricFamily,
    CounterMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily] | type[SummaryMetricFamily]

#: Values of the labels, and of the sample: a number, a `Histogram`, or the count and the sum of a summary.
Samples = Iterable[tuple[list[str], Any]]
T = TypeVar("T")


class Family(NamedTuple):
    """One family. Values of a family named `_seconds` are nanoseconds here.

    is_optional: it is left out if it has no samples.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[EngineMetrics], Samples]
    is_optional: bool = False

    def read(self, metrics: EngineMetrics) -> Metric:
        """The family with its samples of this moment."""
        family = self.kind(self.name, self.help, labels=self.labels)
        unit = NANOSECONDS_PER_SECOND if self.name.endswith("_seconds") else 1
        for labels, value in self.samples(metrics):
            if isinstance(family, HistogramMetricFamily):
                # Prometheus counts each bucket's values with those of all below it.
                bounds = [floatToGoString(bound / unit) for bound in value.bounds]
                buckets = list(zip([*bounds, "+Inf"], accumulate(value.counts), strict=True))
                family.add_metric(labels, buckets, value.total / unit)
            elif isinstance(family, SummaryMetricFamily):
                family.add_metric(labels, value[0], value[1] / unit)
            else:
                family.add_metric(labels, value if unit == 1 else value / unit)
        return family


class Scope(NamedTuple, Generic[T]):
    """A kind of thing that families measure, with its labels. Call it to declare a family.

    by: the label of a family whose value is a mapping, with one sample for each key.
    """

    labels: tuple[str, ...]
    find: Callable[[EngineMetrics], Iterable[tuple[list[str], T]]]
    is_optional: bool = False

    def __call__(self, kind: Kind, name: str, text: str, value: Callable[[T], Any], *, by: str = "") -> Family:
        def samples(metrics: EngineMetrics) -> Samples:
            for labels, measured in self.find(metrics):
                if not by:
                    yield labels, value(measured)
                else:
                    yield from (([*labels, key], found) for key, found in sorted(value(measured).items()))

        labels = (*self.labels, by) if by else self.labels
        return Family(kind, name, text, labels, samples, self.is_optional)
