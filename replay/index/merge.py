"""Joins the indices of a run's segments, each made from its segment's own snapshot, to that of the run.

What was under way at a border is in both parts: open in the first, seeded from the snapshot in the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eventlm.replay.index.gauges import UNSEEN_CAUSE
from eventlm.replay.index.indexer import CoreSnapshot
from eventlm.replay.index.tables import (
    DRAINS,
    GAUGES,
    LOADS,
    MARKS,
    SCHEMAS,
    STAGES,
    Column,
    NameTable,
    Table,
)

#: Columns that hold positions of names.
_NAMED = {"requests": ("kind", "service_class", "reason"), "marks": ("text",), "attempts": ("end",)}
#: Of a request that goes on: what the later part knows better, and what was reached in either part.
_LATEST = ("ended_ns", "ended_s", "reason", "output_tokens", "cached_tokens")
_FIRST = ("launched_ns", "first_token_ns")
#: Of an attempt that goes on.
_LATER = ("ended_ns", "end", "status", "retry_ns", "total")
_DONE = ("done_s", "start_ns", "end_ns", "completed_ns", "busy_ns", "emitted")


class IndexPart:
    """What one segment gave. Its tables are as an Indexer's."""

    def __init__(self, names: list[str], tables: dict[str, Table], snapshots: Sequence[CoreSnapshot]) -> None:
        self.names = names
        self.tables = tables
        self.snapshots = snapshots


class Merger:
    """Takes the parts in order."""

    def __init__(self) -> None:
        self._names = NameTable()
        self._chunks: dict[str, list[dict[str, Column]]] = {schema.name: [] for schema in SCHEMAS}
        self._num_rows = dict.fromkeys((schema.name for schema in SCHEMAS), 0)
        self._snapshots: list[CoreSnapshot] = []
        #: What may go on in the next part: by identity its request's row; by that row its phase; by (request's row,
        #: replica, is_chunk) its stretch; by (replica, step) its step.
        self._open_requests: dict[tuple[int, int], int] = {}
        self._open_phases: dict[int, int] = {}
        self._last_stretches: dict[tuple[int, int, int], int] = {}
        self._open_steps: dict[tuple[int, int], int] = {}
        #: By (request's row, number): an attempt.
        self._open_attempts: dict[tuple[int, int], int] = {}
        #: By replica: the latest step.
        self._last_steps: dict[int, int] = {}
        #: By replica: the head of those that wait, its cause and the blocks that it lacks.
        self._heads: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def add(self, part: IndexPart) -> None:
        """Append the next part."""
        columns = {
            name: {column: table[column].copy() for column in table.schema.columns}
            for name, table in part.tables.items()
        }
        positions = np.array([self._names.position(name) for name in part.names], np.int64)
        for name, named in _NAMED.items():
            for column in named:
                values = columns[name][column]
                known = values >= 0
                values[known] = positions[values[known]]
        rows = self._add_requests(columns["requests"])
        for name in ("phases", "stretches", "attempts"):
            values = columns[name]["row"]
            columns[name]["row"] = np.where(values >= 0, rows[values], -1)
        self._add_phases(columns["phases"])
        self._add_stretches(columns["stretches"])
        self._add_attempts(columns["attempts"])
        self._end_stretches(columns["steps"])
        self._add_steps(columns["steps"])
        columns["gauges"]["drain"] += self._num_rows["drains"]
        self._carry_heads(columns["gauges"])
        for schema in (STAGES, LOADS, DRAINS, GAUGES, MARKS):
            self._append(schema.name, columns[schema.name])
        self._snapshots += part.snapshots

    def _append(self, name: str, columns: dict[str, Column], kept: Column | None = None) -> None:
        if kept is not None:
            columns = {column: values[kept] for column, values in columns.items()}
        self._chunks[name].append(columns)
        self._num_rows[name] += len(next(iter(columns.values())))

    def _at(self, name: str, row: int) -> tuple[dict[str, Column], int]:
        """The columns that hold a row that was appended, and its place there. What goes on is in a late part."""
        end = self._num_rows[name]
        for columns in reversed(self._chunks[name]):
            end -= len(next(iter(columns.values())))
            if row >= end:
                return columns, row - end
        raise IndexError(row)

    def _add_requests(self, columns: dict[str, Column]) -> Column:
        """The rows that the part's rows have in the whole."""
        identities = list(zip(columns["request"].tolist(), columns["index"].tolist(), strict=True))
        rows = np.empty(len(identities), np.int64)
        kept = np.ones(len(identities), np.bool_)
        next_row = self._num_rows["requests"]
        for number, identity in enumerate(identities):
            known = self._open_requests.get(identity, -1)
            if known >= 0:
                kept[number] = False
                rows[number] = known
                self._go_on(known, {name: int(values[number]) for name, values in columns.items()})
            else:
                rows[number] = next_row
                next_row += 1
        self._append("requests", columns, np.flatnonzero(kept))
        is_open = columns["ended_ns"] < 0
        self._open_requests = {identities[n]: int(rows[n]) for n in np.flatnonzero(is_open).tolist()}
        return rows

    def _go_on(self, row: int, later: dict[str, int]) -> None:
        columns, place = self._at("requests", row)
        for name in _LATEST:
            columns[name][place] = later[name]
        if later["replica"] >= 0:
            # Where its worker was lost before, the later part does not know it.
            columns["replica"][place] = later["replica"]
        for name in _FIRST:
            if columns[name][place] < 0:
                columns[name][place] = later[name]
        columns["preemptions"][place] += later["preemptions"]
        columns["last_token_ns"][place] = max(columns["last_token_ns"][place], later["last_token_ns"])

    def _add_phases(self, columns: dict[str, Column]) -> None:
        kept = np.ones(len(columns["row"]), np.bool_)
        seen: set[int] = set()
        for number, row in enumerate(columns["row"].tolist()):
            if row not in self._open_phases:
                continue
            if row in seen:
                continue
            seen.add(row)
            before, place = self._at("phases", self._open_phases[row])
            if before["phase"][place] == columns["phase"][number]:
                kept[number] = False
                before["end_ns"][place] = columns["end_ns"][number]
                if columns["last_step"][number] >= 0:
                    if before["first_step"][place] < 0:
                        before["first_step"][place] = columns["first_step"][number]
                    before["last_step"][place] = columns["last_step"][number]
            else:
                before["end_ns"][place] = columns["start_ns"][number]
        still_open = {row: place for row, place in self._open_phases.items() if self._is_open(place)}
        first = self._num_rows["phases"]
        self._append("phases", columns, np.flatnonzero(kept))
        added = self._chunks["phases"][-1]
        opened = {int(added["row"][n]): first + n for n in np.flatnonzero(added["end_ns"] < 0).tolist()}
        self._open_phases = still_open | opened

    def _is_open(self, row: int) -> bool:
        columns, place = self._at("phases", row)
        return bool(columns["end_ns"][place] < 0)

    def _add_stretches(self, columns: dict[str, Column]) -> None:
        """Steps in flight at the border are in both parts; the earlier one has all their stretches."""
        kept = np.ones(len(columns["row"]), np.bool_)
        names = ("row", "replica", "is_chunk", "first_step", "last_step", "tokens")
        values = zip(*(columns[name].tolist() for name in names), strict=True)
        latest: dict[tuple[int, int, int], int] = {}
        for number, (row, replica, is_chunk, first_step, last_step, tokens) in enumerate(values):
            border = self._last_steps.get(replica, -1)
            known = self._last_stretches.get((row, replica, is_chunk), -1)
            if last_step <= border:
                kept[number] = False
            elif first_step <= border + 1 and known >= 0:
                before, place = self._at("stretches", known)
                before["last_step"][place] = last_step
                before["tokens"][place] += tokens if is_chunk else last_step - border
                kept[number] = False
                latest[row, replica, is_chunk] = known
        first = self._num_rows["stretches"]
        self._append("stretches", columns, np.flatnonzero(kept))
        added = self._chunks["stretches"][-1]
        keys = zip(*(added[name].tolist() for name in names[:3]), strict=True)
        latest |= {key: first + number for number, key in enumerate(keys)}
        self._last_stretches |= latest

    def _end_stretches(self, columns: dict[str, Column]) -> None:
        """Only those that the latest step of their replica is in can go on in the next part."""
        for replica in set(columns["replica"].tolist()):
            self._last_steps[replica] = int(columns["step"][columns["replica"] == replica].max())
        for key, known in list(self._last_stretches.items()):
            before, place = self._at("stretches", known)
            if before["last_step"][place] != self._last_steps.get(key[1], -1):
                del self._last_stretches[key]

    def _add_steps(self, columns: dict[str, Column]) -> None:
        kept = np.ones(len(columns["step"]), np.bool_)
        for number in np.flatnonzero(columns["launched_ns"] < 0).tolist():
            known = self._open_steps.get((int(columns["replica"][number]), int(columns["step"][number])), -1)
            if known >= 0:
                before, place = self._at("steps", known)
                for name in _DONE:
                    before[name][place] = columns[name][number]
                kept[number] = False
        first = self._num_rows["steps"]
        self._append("steps", columns, np.flatnonzero(kept))
        added = self._chunks["steps"][-1]
        pairs = zip(added["replica"].tolist(), added["step"].tolist(), (added["done_s"] < 0).tolist(), strict=True)
        still_open = {key: row for key, row in self._open_steps.items() if self._is_flying(row)}
        opened = {(replica, step): first + n for n, (replica, step, is_open) in enumerate(pairs) if is_open}
        self._open_steps = still_open | opened

    def _is_flying(self, row: int) -> bool:
        columns, place = self._at("steps", row)
        return bool(columns["done_s"][place] < 0)

    def _add_attempts(self, columns: dict[str, Column]) -> None:
        """Those under way at the border are in both parts; the earlier one knows how they began."""
        kept = np.ones(len(columns["row"]), np.bool_)
        keys = list(zip(columns["row"].tolist(), columns["attempt"].tolist(), strict=True))
        still_open: dict[tuple[int, int], int] = {}
        for number, key in enumerate(keys):
            known = self._open_attempts.get(key, -1)
            if known < 0:
                continue
            kept[number] = False
            before, place = self._at("attempts", known)
            for name in _LATER:
                before[name][place] = columns[name][number]
            if before["first_ns"][place] < 0:
                before["first_ns"][place] = columns["first_ns"][number]
            if columns["end"][number] < 0:
                still_open[key] = known
        first = self._num_rows["attempts"]
        self._append("attempts", columns, np.flatnonzero(kept))
        added = self._chunks["attempts"][-1]
        rows = zip(added["row"].tolist(), added["attempt"].tolist(), (added["end"] < 0).tolist(), strict=True)
        opened = {(row, attempt): first + n for n, (row, attempt, is_open) in enumerate(rows) if is_open}
        self._open_attempts = still_open | opened

    def _carry_heads(self, columns: dict[str, Column]) -> None:
        """The head that waited at the border waits for the same reason until there is a new plan."""
        values = zip(*(columns[name].tolist() for name in ("replica", "head_request", "head_index")), strict=True)
        for number, (replica, request, index) in enumerate(values):
            before = self._heads.get(replica)
            if columns["head_cause"][number] == UNSEEN_CAUSE and before is not None and before[0] == (request, index):
                columns["head_cause"][number], columns["head_lacking"][number] = before[1]
            reason = (int(columns["head_cause"][number]), int(columns["head_lacking"][number]))
            self._heads[replica] = ((request, index), reason)

    def merged(self) -> IndexPart:
        """The whole."""
        tables = {
            schema.name: Table(
                schema,
                {
                    column: np.concatenate([chunk[column] for chunk in self._chunks[schema.name]])
                    for column in schema.columns
                },
            )
            for schema in SCHEMAS
        }
        return IndexPart(self._names.names, tables, self._snapshots)
