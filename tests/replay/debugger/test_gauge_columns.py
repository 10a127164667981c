"""Gauges as columns; `test_search` compares them with a straight replay."""

from __future__ import annotations

from eventlm.replay.debugger.gauge_columns import GaugeColumns
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER


def test_the_values_at_an_event_are_those_of_the_last_drain(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl")
    gauges = GaugeColumns(index)
    first, second = index.drains["s"][:2].tolist()
    assert gauges.drain_at(first - 1) == -1
    assert gauges.values(["free", "time"], 0, first - 1) == {"free": None, "time": None}
    for s in (first, second - 1):
        row = index.gauges_at(0)[0]
        expected = {"free": row["free"], "time": int(index.drains["ts"][0]), "replica": 0}
        assert gauges.values(["free", "time", "replica"], 0, s) == expected


def test_the_head_of_the_line(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl")
    gauges = GaugeColumns(index)
    names = ["waiting", "oldest_wait", "head_cause", "head_request", "head_index", "head_lacking"]
    causes = set()
    for s in gauges.drains.tolist():
        found = gauges.values(names, 0, s)
        assert (found["waiting"] == 0) == (found["oldest_wait"] is None) == (found["head_cause"] is None)
        assert (found["head_request"] is None) == (found["head_lacking"] is None)
        causes.add(found["head_cause"])
    assert "blocks" in causes


def test_a_log_alone_leaves_gauges_unknown(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl", verify=False)
    gauges = GaugeColumns(index)
    found = gauges.values(["free", "running", "held"], 0, int(gauges.drains[20]))
    assert found["free"] is None
    assert found["running"] is not None
    assert found["held"] is not None
