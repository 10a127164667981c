"""Tables grow, are finished, and give their rows."""

from __future__ import annotations

import numpy as np

from eventlm.replay.index.tables import GrowingTable, NameTable, Schema


def test_a_table_grows_and_is_copied() -> None:
    growing = GrowingTable(Schema("pairs", ("a", "b")))
    assert growing.add(1, 10) == 0
    finished = growing.finished()
    growing.columns["b"][0] = 11
    assert growing.add(2, 20) == 1
    assert len(finished) == 1
    assert finished.row(0) == {"a": 1, "b": 10}
    later = growing.finished()
    assert list(later.rows(later["a"] > 1)) == [{"a": 2, "b": 20}]
    assert list(later.rows(np.array([1, 0]))) == [{"a": 2, "b": 20}, {"a": 1, "b": 11}]


def test_names_are_numbered_once() -> None:
    names = NameTable(["x"])
    assert [names.position(name) for name in ("y", "x", "y")] == [1, 0, 1]
    assert names.names == ["x", "y"]
