"""Results as lines and as objects."""

from __future__ import annotations

from eventlm.replay.debugger.results import (
    ReplicaGauges,
    ReportResult,
    Stop,
    TableResult,
    TextResult,
    seconds,
    sequence_name,
)


def test_a_stop_says_whose_state_it_shows() -> None:
    gauges = ReplicaGauges(replica=0, waiting=1, running=2, held=1200)
    stop = Stop(s=1042, ts=12_345_678_900, event="launch", line="launch step=3", state_s=1040, replicas=[gauges])
    assert list(stop.lines()) == [
        "event 1,042 at 12.345679 s: launch step=3",
        "  the state is that after event 1,040, the fact that led to this decision",
        "  replica 0: running 2, waiting 1, held 1,200",
    ]
    found = stop.to_object()
    assert (found["kind"], found["s"], found["state_s"]) == ("stop", 1042, 1040)
    assert found["replicas"][0]["free"] == -1


def test_a_table() -> None:
    rows: list[list[int | str | bool | None]] = [[1, "a", 1_500_000, True], [None, "bcd", None, False]]
    found = TableResult(title="two", columns=["n", "name", "wait_ns", "up"], rows=rows, notes=["that is all"])
    assert list(found.lines()) == [
        "two",
        "n  name  wait, ms   up",
        "1  a        1.500  yes",
        "-  bcd          -   no",
        "that is all",
    ]
    assert found.to_object()["rows"] == rows


def test_a_long_table_is_cut_for_people_only() -> None:
    found = TableResult(title="many", columns=["n"], rows=[[number] for number in range(100)])
    assert list(found.lines())[-1] == "and 60 more rows"
    assert len(found.to_object()["rows"]) == 100
    assert list(TableResult(title="none", columns=["n"], rows=[]).lines()) == ["none"]


def test_texts_and_reports() -> None:
    assert TextResult(text=["a", "b"]).to_object() == {"kind": "text", "text": ["a", "b"]}
    report = ReportResult(text=["a"], report={"x": 1})
    assert list(report.lines()) == ["a"]
    assert report.to_object()["report"] == {"x": 1}


def test_names() -> None:
    assert sequence_name((4, 0)) == "4"
    assert sequence_name((4, 0), 3) == "4.0"
    assert sequence_name((4, 1)) == "4.1"
    assert seconds(1_500_000_000) == "1.500000 s"
