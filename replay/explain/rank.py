"""The slowest sequences of a trace by a measure of the metrics store; unfinished ones by their time so far."""

from __future__ import annotations

import heapq
from collections import Counter
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.metrics.rows import UNFINISHED, RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.types import OnProgress, TimeWindow

#: Measures for the ranking, and their fields of `RequestRow`.
Measure = Literal["e2e", "ttft", "queue", "tpot"]
FIELDS: dict[Measure, str] = {
    "e2e": "request_e2e_time",
    "ttft": "prefill_e2e_time",
    "queue": "request_scheduling_delay",
    "tpot": "request_time_per_output_token",
}


class Ranking(Struct, frozen=True, kw_only=True):
    """The slowest sequences, the slowest first.

    rows: those with `reason` "unfinished" had not ended where the log does. models: what each replica serves, by its
    number. num_ranked: all sequences with a value of
    the measure. num_ended, num_live: sequences that have ended, and those that have not; all of the window, if there
    is one.
    """

    path: str
    by: Measure
    rows: list[RequestRow]
    models: list[str]
    num_ranked: int
    num_ended: int
    num_live: int
    warnings: list[str]


def measured_ns(row: RequestRow, by: Measure) -> int | None:
    """What a row is ranked by. Of an unfinished one that is its time so far, which can only grow; for the time per
    token it counts the token that it waits for. None: it never began what is measured.
    """
    value: int | None = getattr(row, FIELDS[by])
    if row.reason != UNFINISHED:
        return value
    if by == "tpot":
        if row.prefill_e2e_time is None or not row.output_tokens:
            return None
        return (row.request_e2e_time - row.prefill_e2e_time) // row.output_tokens
    if value is not None:
        return value
    return row.finished_ns - row.arrived_ns if by == "queue" else row.request_e2e_time


class _Slowest:
    """A metrics sink that keeps the `count` slowest rows, and counts the tokens of sequences that have not ended."""

    def __init__(self, by: Measure, count: int, window: TimeWindow | None) -> None:
        self.num_ranked = 0
        self.num_ended = 0
        self.num_tokens: Counter[tuple[int, int]] = Counter()
        self._by = by
        self._count = count
        self._window = window
        self._heap: list[tuple[int, int, int, RequestRow]] = []

    def request_ended(self, row: RequestRow) -> None:
        """Rank a sequence that has ended."""
        self.num_tokens.pop((row.request, row.index), None)
        if self.is_wanted(row):
            self.num_ended += 1
            self.add(row)

    def is_wanted(self, row: RequestRow) -> bool:
        """Whether its request arrived in the window, if there is one."""
        return self._window is None or self._window.has(row.arrived_ns)

    def step_completed(self, row: StepRow) -> None:
        """Count its tokens."""
        self.num_tokens.update(row.tokens)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Count them."""
        self.num_tokens[row.request, row.index] += row.num_tokens

    def add(self, row: RequestRow) -> None:
        """Rank a row. Ties go to the earlier request."""
        value_ns = measured_ns(row, self._by)
        if value_ns is None:
            return
        self.num_ranked += 1
        heapq.heappush(self._heap, (value_ns, -row.request, -row.index, row))
        if len(self._heap) > self._count:
            heapq.heappop(self._heap)

    def rows(self) -> list[RequestRow]:
        """The slowest first."""
        return [entry[3] for entry in sorted(self._heap, reverse=True)]


def rank(
    path: Path | str,
    count: int,
    *,
    by: Measure = "e2e",
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> Ranking:
    """The slowest sequences of a trace, or of those that arrived in a window of it. Raises as LogReader does."""
    slowest = _Slowest(by, count, window)
    store = MetricsStore(sink=slowest)
    with LogReader(path, strict=strict) as reader:
        reader.fold(store.apply, on_progress=on_progress)
        unfinished = [row for row in store.unfinished(slowest.num_tokens) if slowest.is_wanted(row)]
        for row in unfinished:
            slowest.add(row)
        return Ranking(
            path=reader.path,
            by=by,
            rows=slowest.rows(),
            models=[core.models[0] for core in reader.header.cores_of_replicas()],
            num_ranked=slowest.num_ranked,
            num_ended=slowest.num_ended,
            num_live=len(unfinished),
            warnings=reader.warnings(),
        )
