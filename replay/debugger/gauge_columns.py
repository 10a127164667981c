"""The gauges of an index as columns of an expression: a value for each drain, or the values at one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eventlm.replay.debugger.vectors import Vector
from eventlm.replay.expressions.evaluation import Value
from eventlm.replay.index.gauges import UNSEEN_CAUSE, WAIT_CAUSES
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column

#: What a log alone does not tell.
NEEDS_STATES = frozenset(
    (
        "free",
        "cached",
        "partial",
        "in_flight",
        "oldest_wait",
        "head_cause",
        "head_request",
        "head_index",
        "head_lacking",
    )
)
#: Texts of `head_cause`.
HEAD_CAUSES = (*WAIT_CAUSES, "unseen")


class GaugeColumns:
    """Reads columns of one index, and keeps those that were read."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.num_replicas = index.header.num_replicas
        #: Positions of the drains: their last facts.
        self.drains: Column = index.drains["s"]
        self._positions: list[int] = self.drains.tolist()
        self._column = lru_cache(maxsize=64)(self._read)

    def drain_at(self, s: int) -> int:
        """The last drain that is over at an event; -1: none."""
        return bisect_right(self._positions, s) - 1

    def columns(self, names: Iterable[str], replica: int) -> dict[str, Vector]:
        """The columns of these names for one replica."""
        return {name: self._column(name, replica) for name in names}

    def values(self, names: Iterable[str], replica: int, s: int) -> dict[str, Value]:
        """What holds at an event."""
        drain = self.drain_at(s)
        return {name: _value(self._column(name, replica), drain) for name in names}

    def _read(self, name: str, replica: int) -> Vector:
        index = self._index
        if name == "time":
            return Vector(index.drains["ts"])
        if name == "live":
            return Vector(index.drains["live"])
        if name == "replica":
            return Vector(np.full(len(index.drains), replica, np.int64))
        if name == "oldest_wait":
            oldest = index.gauge_by_drain("oldest_ns", replica)
            return Vector(index.drains["ts"] - oldest, oldest >= 0)
        if name == "head_cause":
            causes = index.gauge_by_drain(name, replica)
            return Vector(np.where(causes == UNSEEN_CAUSE, len(WAIT_CAUSES), causes), causes != -1, HEAD_CAUSES)
        values = index.gauge_by_drain(name, replica)
        if name == "head_lacking":
            return Vector(values, index.gauge_by_drain("head_request", replica) >= 0)
        return Vector(values, _unless_all(values >= 0))


def _unless_all(is_known: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    return None if is_known.all() else is_known


def _value(column: Vector, drain: int) -> Value:
    if drain < 0 or (column.is_known is not None and not column.is_known[drain]):
        return None
    number = int(column.values[drain])
    return number if column.texts is None else column.texts[number]
