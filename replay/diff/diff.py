"""Compares two runs of one workload: their configurations, the first decision that differs, and each request.

a, b = read_side("A"), read_side("B")
found = diff(a, b)
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.events import Arrived, Event, Header, Rejected
from eventlm.metrics.trace_metrics import Distribution, distribution
from eventlm.replay.diff.comparable import ComparableNames
from eventlm.replay.diff.first_difference import FirstDifference, find_first_difference
from eventlm.replay.diff.pairing import Pairing, pair_requests
from eventlm.replay.outcome import LATENCIES, OutcomeCollector, SequenceOutcome
from eventlm.types import OnProgress

#: Compared metrics of a sequence, and their fields of `SequenceOutcome`.
METRICS = LATENCIES | {
    "preemptions": "num_preemptions",
    "cached_tokens": "cached_tokens",
    "output_tokens": "output_tokens",
}
#: Fields of a header that differ between any two runs, or are redundant.
_OF_EVERY_RUN = frozenset(
    {"s", "ts", "c", "run", "unix_start_ns", "previous_h", "config_hash", "config.record.record", "t", "seeds"}
)


class TraceSide(Struct, frozen=True, kw_only=True):
    """The compared part of a run. `sequences` by (request, index): those that have ended."""

    path: str
    header: Header
    num_events: int
    arrivals: list[Arrived]
    num_rejected: int
    sequences: dict[tuple[int, int], SequenceOutcome]
    warnings: list[str]


class FieldDifference(Struct, frozen=True, kw_only=True):
    """A field of the headers, such as `core.num_blocks`, with its values; None if a run does not have it."""

    name: str
    a: Any
    b: Any


class SequenceDelta(Struct, frozen=True, kw_only=True):
    """A sequence that ran to its end in both runs; `pair` counts from 1, in the order of A's arrivals."""

    pair: int
    index: int
    a: SequenceOutcome
    b: SequenceOutcome

    def delta(self, metric: str) -> int | None:
        """B's value of one of METRICS minus A's; None unless both have one."""
        before, after = getattr(self.a, METRICS[metric]), getattr(self.b, METRICS[metric])
        return None if before is None or after is None else after - before


class MetricDelta(Struct, frozen=True, kw_only=True):
    """A metric over the sequences that have it in both runs; `delta`: B's value minus A's, by sequence.

    num_less, num_more: sequences whose value is smaller, or larger, in B.
    """

    metric: str
    a: Distribution
    b: Distribution
    delta: Distribution
    num_less: int
    num_more: int


class TraceDiff(Struct, frozen=True, kw_only=True):
    """The result. only_a, only_b: requests without a partner. num_uncompared: sequences of paired requests that did not
    run to their end in both runs.
    """

    a: TraceSide
    b: TraceSide
    header: list[FieldDifference]
    num_pairs: int
    only_a: list[int]
    only_b: list[int]
    first: FirstDifference | None
    num_uncompared: int
    metrics: list[MetricDelta]
    sequences: list[SequenceDelta]

    @property
    def is_same(self) -> bool:
        """Whether all requests have a partner and all decisions are equal; times and headers may differ."""
        return not self.only_a and not self.only_b and self.first is None

    @property
    def is_identical(self) -> bool:
        """Whether also all metrics of all requests are equal."""
        return self.is_same and not any(sequence.delta(metric) for sequence in self.sequences for metric in METRICS)

    def largest(self, metric: str, num_most: int) -> list[SequenceDelta]:
        """The sequences that changed most in one of METRICS, the largest change first."""
        changed = [found for found in self.sequences if found.delta(metric)]
        return sorted(changed, key=lambda found: (-abs(found.delta(metric) or 0), found.pair, found.index))[:num_most]


def read_side(path: Path | str, *, strict: bool = False, on_progress: OnProgress | None = None) -> TraceSide:
    """Read one of the runs. Raises as LogReader does."""
    collector = OutcomeCollector()
    arrivals: list[Arrived] = []
    rejections: list[Rejected] = []

    def see(event: Event) -> None:
        if isinstance(event, Arrived):
            arrivals.append(event)
        elif isinstance(event, Rejected):
            rejections.append(event)
        collector.see(event)

    with LogReader(path, strict=strict) as reader:
        reader.fold(see, on_progress=on_progress)
        return TraceSide(
            path=reader.path,
            header=reader.header,
            num_events=reader.num_lines,
            arrivals=arrivals,
            num_rejected=len(rejections),
            sequences={(found.request, found.index): found for found in collector.outcome().sequences},
            warnings=[*_begins_late(reader), *reader.warnings()],
        )


def _begins_late(reader: LogReader) -> list[str]:
    if not reader.header.s:
        return []
    return [f"{reader.path} begins with event {reader.header.s:,}: earlier events were not kept and are not compared"]


def diff(a: TraceSide, b: TraceSide, *, on_progress: OnProgress | None = None) -> TraceDiff:
    """Compare two runs; both are read again up to the first difference. Raises as LogReader does."""
    pairing = pair_requests(a.arrivals, b.arrivals)
    numbers_a = {pair[0]: number for number, pair in enumerate(pairing.pairs, 1)}
    numbers_b = {pair[1]: number for number, pair in enumerate(pairing.pairs, 1)}
    times_a, times_b = ({arrival.s: arrival.ts for arrival in side.arrivals} for side in (a, b))
    with LogReader(a.path) as reader_a, LogReader(b.path) as reader_b:
        first = find_first_difference(
            reader_a,
            reader_b,
            ComparableNames("A", numbers_a, a.header.s),
            ComparableNames("B", numbers_b, b.header.s),
            arrivals=[(times_a[pair[0]], times_b[pair[1]]) for pair in pairing.pairs],
            on_progress=on_progress,
        )
    sequences, num_uncompared = _sequences(a, b, pairing)
    return TraceDiff(
        a=a,
        b=b,
        header=header_differences(a.header, b.header),
        num_pairs=len(pairing.pairs),
        only_a=pairing.only_a,
        only_b=pairing.only_b,
        first=first,
        num_uncompared=num_uncompared,
        metrics=_metrics(sequences),
        sequences=sequences,
    )


def _sequences(a: TraceSide, b: TraceSide, pairing: Pairing) -> tuple[list[SequenceDelta], int]:
    num_samples = {arrival.s: arrival.n for arrival in a.arrivals}
    found = []
    num_uncompared = 0
    for pair, (request_a, request_b) in enumerate(pairing.pairs, 1):
        for index in range(num_samples[request_a]):
            before, after = a.sequences.get((request_a, index)), b.sequences.get((request_b, index))
            if before is not None and after is not None and before.is_complete and after.is_complete:
                found.append(SequenceDelta(pair=pair, index=index, a=before, b=after))
            else:
                num_uncompared += 1
    return found, num_uncompared


def _metrics(sequences: list[SequenceDelta]) -> list[MetricDelta]:
    found = []
    for metric, field in METRICS.items():
        measured = [sequence for sequence in sequences if sequence.delta(metric) is not None]
        deltas = [sequence.delta(metric) or 0 for sequence in measured]
        if measured:
            found.append(
                MetricDelta(
                    metric=metric,
                    a=distribution(Counter(getattr(sequence.a, field) for sequence in measured)),
                    b=distribution(Counter(getattr(sequence.b, field) for sequence in measured)),
                    delta=distribution(Counter(deltas)),
                    num_less=sum(delta < 0 for delta in deltas),
                    num_more=sum(delta > 0 for delta in deltas),
                )
            )
    return found


def header_differences(a: Header, b: Header) -> list[FieldDifference]:
    """Differences of two headers: configuration, plug-ins, predictor, host, versions."""
    fields_a, fields_b = _fields(a), _fields(b)
    sources_a, sources_b = _sources(a), _sources(b)
    fields_a |= {name: source for name, source in sources_a.items() if name in sources_b}
    fields_b |= {name: source for name, source in sources_b.items() if name in sources_a}
    names = [*fields_a, *(name for name in fields_b if name not in fields_a)]
    return [
        FieldDifference(name=name, a=fields_a.get(name), b=fields_b.get(name))
        for name in names
        if fields_a.get(name) != fields_b.get(name) and name not in _OF_EVERY_RUN
    ]


def _fields(header: Header) -> dict[str, Any]:
    """Fields by dotted names; the plug-ins that ran from the start by their kind."""
    plugins: dict[str, Any] = {}
    for record in header.plugins:
        plugins.setdefault(record.kind, format_plugin_spec({"type": record.name} | record.parameters))
    fields = {name: value for name, value in msgspec.to_builtins(header).items() if name != "plugins"}
    return plugins | dict(_flattened(fields, ""))


def _sources(header: Header) -> dict[str, Any]:
    """Version and hash of each installed plug-in."""
    return {
        f"source of {record.kind} {record.name}": f"{record.version} {record.source_hash}" for record in header.plugins
    }


def _flattened(value: Any, name: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, value)]
    if name in _OF_EVERY_RUN:
        return []
    prefix = f"{name}." if name else ""
    return [pair for key, inner in value.items() for pair in _flattened(inner, f"{prefix}{key}")]
