"""The index of a run as its readers see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from eventlm.bus.log_reader import LogReader
from eventlm.core.core import Core
from eventlm.errors import UsageError
from eventlm.events import Fact, Header, Marker
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.backend_names import names_at_start
from eventlm.replay.index.file import IndexContent, IndexFacts
from eventlm.replay.index.indexer import CoreSnapshot
from eventlm.replay.index.tables import Column, MarkKind, Table
from eventlm.replay.rebuild import Rebuilt
from eventlm.types import SequenceId


class Index:
    """Columns, names and snapshots of one run.

    path: the trace. header: its first line. rebuilt: how to make its core; None if the run was not verified.
    """

    def __init__(self, path: str, header: Header, content: IndexContent, rebuilt: Rebuilt | None) -> None:
        self.path = path
        self.header = header
        self.facts: IndexFacts = content.facts
        self.names: list[str] = content.names
        self.tables: dict[str, Table] = content.tables
        self.snapshots: Sequence[CoreSnapshot] = content.snapshots
        self.rebuilt = rebuilt

    @property
    def requests(self) -> Table:
        return self.tables["requests"]

    @property
    def phases(self) -> Table:
        return self.tables["phases"]

    @property
    def stretches(self) -> Table:
        return self.tables["stretches"]

    @property
    def steps(self) -> Table:
        return self.tables["steps"]

    @property
    def stages(self) -> Table:
        return self.tables["stages"]

    @property
    def loads(self) -> Table:
        return self.tables["loads"]

    @property
    def attempts(self) -> Table:
        return self.tables["attempts"]

    @property
    def drains(self) -> Table:
        return self.tables["drains"]

    @property
    def gauges(self) -> Table:
        return self.tables["gauges"]

    @property
    def marks(self) -> Table:
        return self.tables["marks"]

    def name(self, position: int) -> str:
        """A text by its position; "" for -1."""
        return self.names[position] if position >= 0 else ""

    @cached_property
    def backend_names(self) -> dict[int, str]:
        """The addresses of replicas that are other servers, as far as they are known; where several took turns, the
        latest.
        """
        names = names_at_start(self.header)
        ups = self.marks["kind"] == MarkKind.BACKEND_UP
        for replica, text in zip(self.marks["replica"][ups].tolist(), self.marks["text"][ups].tolist(), strict=True):
            names[replica] = self.name(text)
        return dict(sorted(names.items()))

    @cached_property
    def _rows(self) -> dict[SequenceId, int]:
        pairs = zip(self.requests["request"].tolist(), self.requests["index"].tolist(), strict=True)
        return {SequenceId(*pair): row for row, pair in enumerate(pairs)}

    def find_row(self, request: int, index: int = 0) -> int | None:
        """The row of a sequence in `requests`; None if the run has none."""
        return self._rows.get(SequenceId(request, index))

    def drain_of(self, s: int) -> int:
        """The row in `drains` of the drain that event `s` is part of, or for a marker of the one that follows it; the
        number of drains if there is none.
        """
        return int(np.searchsorted(self.drains["next_s"], s, side="right"))

    def end_of_drain(self, s: int) -> int | None:
        """The last fact of event `s`'s drain, where its plans are made; None if the log ends before."""
        drain = self.drain_of(s)
        return int(self.drains["s"][drain]) if drain < len(self.drains) else None

    def drain_before(self, next_s: int) -> int:
        """The last drain that is over before event `next_s`; -1: none."""
        return int(np.searchsorted(self.drains["next_s"], next_s, side="right")) - 1

    def drain_at(self, ts: int) -> int:
        """The last drain at or before a time; -1: none."""
        return int(np.searchsorted(self.drains["ts"], ts, side="right")) - 1

    @cached_property
    def _gauge_rows(self) -> dict[int, tuple[Column, Column]]:
        """By replica: its rows in `gauges`, and their drains."""
        replicas, drains = self.gauges["replica"], self.gauges["drain"]
        found = {}
        for replica in range(self.header.num_replicas):
            rows = np.flatnonzero(replicas == replica)
            found[replica] = (rows, drains[rows])
        return found

    def gauges_at(self, drain: int) -> dict[int, dict[str, int]]:
        """By replica: the row of `gauges` that held after a drain. Without those that have none yet."""
        found = {}
        for replica, (rows, drains) in self._gauge_rows.items():
            position = int(np.searchsorted(drains, drain, side="right")) - 1
            if position >= 0:
                found[replica] = self.gauges.row(int(rows[position]))
        return found

    def gauge_by_drain(self, column: str, replica: int) -> Column:
        """A column of `gauges` for one replica, with a value for each drain; -1 before the first."""
        rows, drains = self._gauge_rows[replica]
        positions = np.searchsorted(drains, np.arange(len(self.drains)), side="right") - 1
        values = self.gauges[column][rows] if len(rows) else np.zeros(1, np.int64)
        return np.where(positions >= 0, values[np.maximum(positions, 0)], -1)

    @cached_property
    def _step_rows(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.steps["replica"].tolist(), self.steps["step"].tolist(), strict=True)
        return {pair: row for row, pair in enumerate(pairs)}

    def step_row(self, replica: int, step: int) -> int | None:
        """The row of a step in `steps`; None if the log does not have it."""
        return self._step_rows.get((replica, step))

    def members(self, replica: int, step: int) -> Column:
        """The rows in `stretches` of the sequences in a step."""
        stretches = self.stretches
        is_member = (stretches["replica"] == replica) & (stretches["first_step"] <= step)
        return np.flatnonzero(is_member & (step <= stretches["last_step"]))

    def snapshot_before(self, next_s: int) -> CoreSnapshot | None:
        """The latest snapshot from which the core before event `next_s` can be reached; None: only from the start."""
        low, high = 0, len(self.snapshots)
        while low < high:
            middle = (low + high) // 2
            if self.snapshots[middle].next_s <= next_s:
                low = middle + 1
            else:
                high = middle
        return self.snapshots[low - 1] if low else None

    def new_core(self) -> Core:
        """The core at the start of the run. Raises UsageError if the run was not verified."""
        if self.rebuilt is None:
            raise UsageError(f"{self.path}: {self.facts.missing}")
        return self.rebuilt.new_core()

    def nearest_core(self, next_s: int) -> Core:
        """A core between two drains that has seen nothing from event `next_s` on: from the latest snapshot, or new.

        Raises UsageError if the run was not verified.
        """
        start = self.snapshot_before(next_s)
        if start is None or self.rebuilt is None:
            return self.new_core()
        return self.rebuilt.restored_core(start.state())

    def core_at(self, next_s: int) -> Core:
        """The core after all facts and markers before event `next_s`; with the decisions that the last fact led to,
        even if they are not before it.

        Raises UsageError if the run was not verified.
        """
        core = self.nearest_core(next_s)
        apply_until(core, self.path, next_s)
        return core


def apply_until(core: Core, path: str, next_s: int) -> None:
    """Apply the facts and markers of a log that come next for a core and before event `next_s`."""
    if core.next_seq >= next_s:
        return
    with LogReader(path) as reader:
        for line in reader.lines_from(core.next_seq):
            if line.tag in DECISION_TAGS or line.s < core.next_seq:
                continue
            event = line.event()
            assert isinstance(event, Fact | Marker)
            core.apply(event)
            if core.next_seq >= next_s:
                return
