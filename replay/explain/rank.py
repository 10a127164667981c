"""The slowest sequences of a trace, by what the metrics store measures."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.metrics.rows import RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.types import OnProgress

#: What requests are ranked by, and the field of a request's row.
Measure = Literal["e2e", "ttft", "queue", "tpot"]
FIELDS: dict[Measure, str] = {
    "e2e": "request_e2e_time",
    "ttft": "prefill_e2e_time",
    "queue": "request_scheduling_delay",
    "tpot": "request_time_per_output_token",
}


class Ranking(Struct, frozen=True, kw_only=True):
    """The slowest sequences that have ended, the slowest first; how many had not ended."""

    path: str
    by: Measure
    rows: list[RequestRow]
    num_ranked: int
    num_ended: int
    num_live: int
    warnings: list[str]


class _Rows:
    """A sink that keeps the `count` slowest rows."""

    def __init__(self, field: str, count: int) -> None:
        self.num_rows = 0
        self.num_ended = 0
        self._field = field
        self._count = count
        self._heap: list[tuple[int, int, int, RequestRow]] = []

    def request_ended(self, row: RequestRow) -> None:
        """Ties go to the earlier request."""
        self.num_ended += 1
        value = getattr(row, self._field)
        if value is None:
            return
        self.num_rows += 1
        heapq.heappush(self._heap, (value, -row.request, -row.index, row))
        if len(self._heap) > self._count:
            heapq.heappop(self._heap)

    def step_completed(self, row: StepRow) -> None:
        """Not wanted."""

    def slowest(self) -> list[RequestRow]:
        """The slowest first."""
        return [entry[3] for entry in sorted(self._heap, reverse=True)]


def rank(
    path: Path | str,
    count: int,
    *,
    by: Measure = "e2e",
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> Ranking:
    """The slowest sequences of a trace. Raises as LogReader does."""
    rows = _Rows(FIELDS[by], count)
    store = MetricsStore(sink=rows)
    with LogReader(path, strict=strict) as reader:
        reader.fold(store.apply, on_progress=on_progress)
        return Ranking(
            path=reader.path,
            by=by,
            rows=rows.slowest(),
            num_ranked=rows.num_rows,
            num_ended=rows.num_ended,
            num_live=store.num_live,
            warnings=reader.warnings(),
        )
