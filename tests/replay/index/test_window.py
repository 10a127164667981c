"""A part of a run, against the rows of the whole that belong to it."""

from __future__ import annotations

from pathlib import Path

from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.types import TimeWindow


def test_what_is_in_a_window(random_runs: list[Path]) -> None:
    num_requests = num_drains = num_of_ranks = 0
    for path in random_runs:
        whole = open_index(path)
        window = TimeWindow(whole.facts.last_ns // 4, whole.facts.last_ns // 2)
        part = windowed(whole, window)
        assert part.facts.last_ns == window.to_ns
        expected = [row for row in whole.requests.rows() if window.has(row["arrived_ns"])]
        assert list(part.requests.rows()) == expected
        num_requests += len(expected)
        for name in ("phases", "stretches"):
            own = {(each["request"], each["index"]) for each in expected}
            found = []
            for row in whole.tables[name].rows():
                if row["row"] >= 0:
                    of = whole.requests.row(row["row"])
                    if (of["request"], of["index"]) in own:
                        new = part.find_row(of["request"], of["index"])
                        assert new is not None
                        found.append(row | {"row": new})
            assert list(part.tables[name].rows()) == found
        assert all(window.has(ts) for ts in part.drains["ts"].tolist())
        for drain, s in enumerate(part.drains["s"].tolist()):
            before = whole.gauges_at(whole.drain_of(s))
            now = part.gauges_at(drain)
            assert {n: row | {"drain": 0} for n, row in now.items()} == {
                n: row | {"drain": 0} for n, row in before.items()
            }
            num_drains += 1
        assert all(window.has(ts) for ts in part.marks["ts"].tolist())
        for row in part.steps.rows():
            if row["done_s"] >= 0:
                # The worker began it, as far as the time of its result tells.
                assert window.overlaps(row["completed_ns"] - row["end_ns"] + row["start_ns"], row["completed_ns"])
        steps = {(row["replica"], row["step"]) for row in part.steps.rows()}
        for name in ("stages", "loads"):
            found = [row for row in whole.tables[name].rows() if (row["replica"], row["step"]) in steps]
            assert list(part.tables[name].rows()) == found
            num_of_ranks += len(found)
    assert num_requests > 20
    assert num_drains > 100
    assert num_of_ranks > 100


def test_to_the_end_and_nothing_at_all(random_runs: list[Path]) -> None:
    whole = open_index(random_runs[0])
    same = windowed(whole, TimeWindow(0, None))
    for name, table in whole.tables.items():
        if name != "stretches":
            assert list(same.tables[name].rows()) == list(table.rows()), name
    empty = windowed(whole, TimeWindow(whole.facts.last_ns + 1, None))
    assert [len(empty.tables[name]) for name in ("requests", "phases", "drains", "gauges", "marks")] == [0] * 5
