"""Latencies of the sequences of an indexed run, as `eventlm trace stats` measures them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eventlm.look.findings.finding import unseen
from eventlm.metrics.rows import COMPLETED
from eventlm.metrics.trace_metrics import Distribution, distribution
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column

#: In the order in which they are shown.
MEASURES = ("ttft", "tpot", "e2e", "queue")


class Measures(NamedTuple):
    """By row of `requests`, in ns; -1: there is none.

    is_measured: sequences whose whole life is in the log, each search counted once. is_complete: of them those that ran
    to their end.
    """

    ttft: Column
    tpot: Column
    e2e: Column
    queue: Column
    is_measured: NDArray[np.bool_]
    is_complete: NDArray[np.bool_]

    def counted(self, measure: str) -> NDArray[np.bool_]:
        """The sequences that count in the distribution of a measure."""
        values: Column = getattr(self, measure)
        # A first token counts even if the sequence was cut short later.
        return (self.is_measured if measure == "ttft" else self.is_complete) & (values >= 0)

    def distribution(self, measure: str, chosen: NDArray[np.bool_] | None = None) -> Distribution | None:
        """Of all sequences that count, or of the chosen ones of them; None if there is none."""
        counted = self.counted(measure) if chosen is None else self.counted(measure) & chosen
        values, times = np.unique(getattr(self, measure)[counted], return_counts=True)
        return distribution(dict(zip(values.tolist(), times.tolist(), strict=True))) if len(values) else None


def measure(index: Index) -> Measures:
    """The latencies of all sequences."""
    requests = index.requests
    received, first, ended = requests["received_ns"], requests["first_token_ns"], requests["ended_ns"]
    launched, last, tokens = requests["launched_ns"], requests["last_token_ns"], requests["output_tokens"]
    is_measured = ~unseen(index) & (requests["is_branch"] == 0) & ~_has_reason(index, _rejections(index))
    is_timed = (first >= 0) & (last >= 0) & (tokens > 1)
    return Measures(
        ttft=np.where(first >= 0, first - received, -1),
        tpot=np.where(is_timed, (last - first) // np.maximum(tokens - 1, 1), -1),
        e2e=np.where(ended >= 0, ended - received, -1),
        queue=np.where(launched >= 0, launched - requests["arrived_ns"], -1),
        is_measured=is_measured,
        is_complete=is_measured & _has_reason(index, COMPLETED),
    )


def _rejections(index: Index) -> set[str]:
    return {name for name in index.names if name.startswith("rejected: ")}


def _has_reason(index: Index, reasons: set[str] | frozenset[str]) -> NDArray[np.bool_]:
    numbers = [number for number, name in enumerate(index.names) if name in reasons]
    found: NDArray[np.bool_] = np.isin(index.requests["reason"], numbers)
    return found


def percentile_rows(index: Index, measures: Measures) -> list[dict[str, Any]]:
    """The distribution of each measure, of all sequences and then of each service class that has a name."""
    classes = index.requests["service_class"]
    groups: list[tuple[str, NDArray[np.bool_] | None]] = [("all", None)]
    groups += [(index.name(each), classes == each) for each in np.unique(classes).tolist() if index.name(each)]
    found = []
    for name, chosen in groups:
        for each in MEASURES:
            of = measures.distribution(each, chosen)
            if of is not None:
                figures = {"count": of.count, "mean": round(of.mean)}
                figures |= {field: getattr(of, field) for field in ("p50", "p90", "p95", "p99", "max")}
                found.append({"group": name, "measure": each, "isAll": chosen is None} | figures)
    return found
