"""The file of an index: any columns come back, and a file that is damaged is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.replay.index.file import (
    BrokenIndexError,
    IndexContent,
    IndexFacts,
    _pack,
    _unpack,
    read_index,
    write_index,
)
from eventlm.replay.index.indexer import CoreSnapshot
from eventlm.replay.index.tables import SCHEMAS, GrowingTable

FACTS = IndexFacts(first_s=0, next_s=9, last_ns=5, last_h="ab", num_bytes=100, is_verified=True)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_columns_come_back(values: list[int]) -> None:
    packed, width, is_difference = _pack(np.array(values, np.int64))
    assert _unpack(packed, width, is_difference=is_difference).tolist() == values


def _content() -> IndexContent:
    tables = {}
    for schema in SCHEMAS:
        table = GrowingTable(schema)
        for row in range(5):
            table.add(*(row * 1000 + column for column in range(len(schema.columns))))
        tables[schema.name] = table.finished()
    return IndexContent(facts=FACTS, names=["a", "ä"], tables=tables, snapshots=[CoreSnapshot(3, 4, b"state")])


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.index"
    write_index(path, _content())
    found = read_index(path)
    assert (found.facts, found.names, list(found.snapshots)) == (FACTS, ["a", "ä"], [CoreSnapshot(3, 4, b"state")])
    for name, table in _content().tables.items():
        assert list(found.tables[name].rows()) == list(table.rows())
    assert [each.name for each in path.parent.iterdir()] == ["x.index"]


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    write_index(path, _content())
    content = path.read_bytes()
    for damaged in (b"", content[:50], content[:-1], content + b"x", content.replace(b'"format":5', b'"format":1')):
        path.write_bytes(damaged)
        with pytest.raises(BrokenIndexError):
            read_index(path)
