"""Ranking: the slowest sequences of a trace by what the metrics store measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from eventlm.metrics.rows import UNFINISHED, RequestRow
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.rank import FIELDS, Measure, measured_ns, rank
from eventlm.types import TimeWindow
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


@pytest.mark.parametrize("by", get_args(Measure))
@pytest.mark.parametrize("name", ["fcfs_one_replica", "lrs_dying_workers"])
def test_unfinished_sequences_are_ranked_by_their_time_so_far(tmp_path: Path, name: str, by: Measure) -> None:
    def cut(objects: Sequence[dict[str, Any]]) -> None:
        del objects[120:]  # type: ignore[attr-defined]

    path = tampered(FOLDER / f"{name}.jsonl", tmp_path / "t", cut)
    found = rank(path, 1000, by=by)
    assert found.num_live >= 3
    assert len(found.warnings) == 1
    explained = {(each.request, each.index): each for each in explain(path, _wanted(found.rows)).explanations}
    unfinished = [row for row in found.rows if row.reason == UNFINISHED]
    if by in ("e2e", "ttft", "queue"):
        assert len(unfinished) == found.num_live
    for row in unfinished:
        each = explained[row.request, row.index]
        assert each.outcome == "unfinished"
        assert row.output_tokens == each.output_tokens
        assert row.finished_ns == each.end_ns
        assert (row.prefill_e2e_time is None) == (each.first_token_ns is None)
        if row.prefill_e2e_time is not None:
            assert each.first_token_ns == each.start_ns + row.prefill_e2e_time
    values = [measured_ns(row, by) for row in found.rows]
    assert values == sorted(values, reverse=True)  # type: ignore[type-var]
    assert found.num_ranked == len(found.rows)


def _wanted(rows: Sequence[RequestRow]) -> list[tuple[int, int | None]]:
    return [(row.request, row.index) for row in rows]


def test_the_time_so_far_of_an_unfinished_row() -> None:
    row = RequestRow(
        request=1, index=0, replica=0, reason=UNFINISHED, arrived_ns=1_000, finished_ns=9_000, prompt_tokens=4,
        output_tokens=3, cached_tokens=0, request_e2e_time=8_500,
    )  # fmt: skip
    assert [measured_ns(row, by) for by in get_args(Measure)] == [8_500, 8_500, 8_000, None]
    row = structs.replace(row, prefill_e2e_time=2_500, request_scheduling_delay=700)
    # The third gap between tokens is not over.
    assert [measured_ns(row, by) for by in get_args(Measure)] == [8_500, 2_500, 700, 2_000]


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.bus.log_reader._LINES_PER_PROGRESS", 50)
    told: list[tuple[int, int]] = []
    path = FOLDER / "edf_tight.jsonl"
    rank(path, 1, on_progress=lambda done, total: told.append((done, total)))
    assert len(told) > 2
    assert told == sorted(told)
    assert {total for _, total in told} == {path.stat().st_size}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_window_ranks_those_that_arrived_in_it(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    whole = rank(path, 1000)
    arrivals = sorted(row.arrived_ns for row in whole.rows)
    window = TimeWindow(arrivals[len(arrivals) // 3], arrivals[-1])
    found = rank(path, 1000, window=window)
    assert found.rows == [row for row in whole.rows if window.has(row.arrived_ns)]
    assert found.num_ended == found.num_ranked == len(found.rows) < whole.num_ended
