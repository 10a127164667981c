"""One replicaset's part of an indexed run, as an index of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eventlm.replay.index.file import IndexContent
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind, SequencePhase, Table
from eventlm.replay.index.window import chosen, of_rows, of_steps

_WAITING = (SequencePhase.QUEUE, SequencePhase.PREEMPTED, SequencePhase.RETRY)
_LIVE = (*_WAITING, SequencePhase.PREFILL, SequencePhase.DECODE, SequencePhase.RECOMPUTE, SequencePhase.TEXT_END)


def of_replicaset(index: Index, number: int) -> Index:
    """The requests for a replicaset, and what its replicas did; all drains, of which only its own sequences count. The
    header and the numbers of replicas are those of the run. number: its place in the header.
    """
    if len(index.header.sets) == 1:
        return index
    own = [replica for replica, of in enumerate(index.header.sets_of_replicas()) if of == number]
    requests, steps, marks = index.requests, index.steps, index.marks
    is_own = requests["replicaset"] == number
    rows = np.where(is_own, np.cumsum(is_own) - 1, -1)
    is_own_step = np.isin(steps["replica"], own)
    # There it is the number of a front end.
    on_own = np.isin(marks["replica"], own) & (marks["kind"] != MarkKind.FRONT_END_LOST)
    is_own_mark = on_own | np.isin(marks["request"], requests["request"][is_own]) | (marks["replicaset"] == number)
    phases = of_rows(index.phases, rows)
    tables = {
        "requests": chosen(requests, is_own),
        "phases": phases,
        "stretches": of_rows(index.stretches, rows),
        "attempts": of_rows(index.attempts, rows),
        "steps": chosen(steps, is_own_step),
        "stages": of_steps(index.stages, steps, is_own_step),
        "loads": of_steps(index.loads, steps, is_own_step),
        "drains": _drains(index.drains, phases),
        "gauges": chosen(index.gauges, np.isin(index.gauges["replica"], own)),
        "marks": chosen(marks, is_own_mark),
    }
    content = IndexContent(facts=index.facts, names=index.names, tables=tables, snapshots=index.snapshots)
    return Index(index.path, index.header, content, index.rebuilt)


def _drains(drains: Table, phases: Table) -> Table:
    columns = {name: drains[name] for name in drains.schema.columns}
    counts = {
        name: _under_way(chosen(phases, np.isin(phases["phase"], kinds)), drains["ts"])
        for name, kinds in (("waiting", _WAITING), ("live", _LIVE))
    }
    return Table(drains.schema, columns | counts)


def _under_way(phases: Table, times: Column) -> Column:
    """How many of the phases have begun and not ended at each time."""
    ends: NDArray[np.int64] = phases["end_ns"][phases["end_ns"] >= 0]
    num_begun = np.searchsorted(np.sort(phases["start_ns"]), times, side="right")
    return num_begun - np.searchsorted(np.sort(ends), times, side="right")
