"""Ranking: the slowest sequences of a trace by what the metrics store measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from eventlm.replay.explain.rank import FIELDS, Measure, rank
from tests.replay.explained_logs import read
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.traces import tampered


@pytest.mark.parametrize("by", get_args(Measure))
@pytest.mark.parametrize("name", GOLDEN)
def test_the_slowest_first_and_ties_in_order_of_arrival(name: str, by: Measure) -> None:
    path = FOLDER / f"{name}.jsonl"
    rows = [row for row in read(path).rows.values() if getattr(row, FIELDS[by]) is not None]
    expected = sorted(rows, key=lambda row: (-getattr(row, FIELDS[by]), row.request, row.index))
    assert len(expected) > 4
    for count in (1, 4, 1000):
        found = rank(path, count, by=by)
        assert found.rows == expected[:count]
        assert (found.num_ranked, found.num_live, found.warnings) == (len(rows), 0, [])


def test_those_that_have_not_ended_are_counted(tmp_path: Path) -> None:
    def cut(objects: Sequence[dict[str, Any]]) -> None:
        del objects[120:]  # type: ignore[attr-defined]

    found = rank(tampered(FOLDER / "fcfs_one_replica.jsonl", tmp_path / "t", cut), 3)
    assert found.num_live > 3
    assert len(found.warnings) == 1


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.bus.log_reader._LINES_PER_PROGRESS", 50)
    told: list[tuple[int, int]] = []
    path = FOLDER / "edf_tight.jsonl"
    rank(path, 1, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) > 2
    assert told == sorted(told)
    assert {total for _, total in told} == {path.stat().st_size}
