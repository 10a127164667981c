"""A part of an indexed run, by time, as an index of its own."""

from __future__ import annotations

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from eventlm.replay.index.file import IndexContent
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import GAUGES, Column, Table
from eventlm.types import TimeWindow


def windowed(index: Index, window: TimeWindow) -> Index:
    """The requests that arrived in a window, with all that became of them, the steps that overlap it, and its drains
    and marks. Snapshots are those of the whole run.
    """
    last_ns = index.facts.last_ns if window.to_ns is None else min(window.to_ns, index.facts.last_ns)
    requests, steps, drains = index.requests, index.steps, index.drains
    is_in = _within(requests["arrived_ns"], window)
    rows = np.where(is_in, np.cumsum(is_in) - 1, -1)
    ends = np.where(steps["completed_ns"] >= 0, steps["completed_ns"], index.facts.last_ns)
    # A result arrives some time after the worker has its step done: the step began as much later.
    took = np.where(steps["done_s"] >= 0, steps["end_ns"] - steps["start_ns"], ends - steps["launched_ns"])
    overlaps = (ends - took < (last_ns if window.to_ns is None else window.to_ns)) & (ends >= window.from_ns)
    is_drain = _within(drains["ts"], window)
    tables = {
        "requests": chosen(requests, is_in),
        "phases": of_rows(index.phases, rows),
        "stretches": of_rows(index.stretches, rows),
        "attempts": of_rows(index.attempts, rows),
        "steps": chosen(steps, overlaps),
        "stages": of_steps(index.stages, steps, overlaps),
        "loads": of_steps(index.loads, steps, overlaps),
        "drains": chosen(drains, is_drain),
        "gauges": _gauges(index, is_drain),
        "marks": chosen(index.marks, _within(index.marks["ts"], window)),
    }
    content = IndexContent(
        facts=structs.replace(index.facts, last_ns=max(last_ns, window.from_ns)),
        names=index.names,
        tables=tables,
        snapshots=index.snapshots,
    )
    return Index(index.path, index.header, content, index.rebuilt)


def _within(times: Column, window: TimeWindow) -> NDArray[np.bool_]:
    is_in = times >= window.from_ns
    return is_in if window.to_ns is None else is_in & (times < window.to_ns)


def chosen(table: Table, selected: NDArray[np.bool_]) -> Table:
    """The selected rows."""
    return Table(table.schema, {name: table[name][selected] for name in table.schema.columns})


def of_rows(table: Table, rows: Column) -> Table:
    """What belongs to requests that are left, with their new rows."""
    new = np.where(table["row"] >= 0, rows[table["row"]], -1) if len(rows) else np.full(len(table), -1)
    columns = {name: table[name][new >= 0] for name in table.schema.columns}
    return Table(table.schema, columns | {"row": new[new >= 0]})


def of_steps(table: Table, steps: Table, selected: NDArray[np.bool_]) -> Table:
    """What belongs to the selected steps."""
    if not len(table):
        return table
    num_replicas = int(steps["replica"].max()) + 1
    numbers = steps["step"] * num_replicas + steps["replica"]
    return chosen(table, np.isin(table["step"] * num_replicas + table["replica"], numbers[selected]))


def _gauges(index: Index, is_drain: NDArray[np.bool_]) -> Table:
    """Those of the drains, and before them what held where the window begins."""
    gauges = index.gauges
    drains = np.flatnonzero(is_drain)
    if not len(drains):
        return chosen(gauges, np.zeros(len(gauges), np.bool_))
    first = int(drains[0])
    before = index.gauges_at(first)
    later = (gauges["drain"] > first) & (gauges["drain"] <= int(drains[-1]))
    columns = {
        name: np.concatenate([np.array([row[name] for row in before.values()], np.int64), gauges[name][later]])
        for name in GAUGES.columns
    }
    columns["drain"] = np.maximum(columns["drain"] - first, 0)
    return Table(GAUGES, columns)
