"""What the process that explains a reply answers: all samples of all its requests, and no path."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eventlm.engine.explanations import ExplainRequest
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.story import to_object
from eventlm.replay.explain.worker import respond
from tests.replay.traces import indices, read_objects, record, small_machine


def test_its_answer_is_that_of_eventlm_explain(tmp_path: Path) -> None:
    path = record(tmp_path, small_machine({"type": "edf", "min_deadline_ms": 1}))
    requests = indices(read_objects(path), "arrive")[:3]
    given = respond(ExplainRequest(run_folder=str(path.parent), requests=requests))
    expected = explain(path.parent, [(request, None) for request in requests]).explanations
    assert [msgspec.json.decode(each) for each in given.explanations] == [
        msgspec.json.decode(msgspec.json.encode(to_object(each))) for each in expected
    ]
    assert given.text.count("\ntotal ") == len(expected)
    assert all(len(line) <= 100 for line in given.text.splitlines())
    assert given.reason is None


def test_a_torn_or_foreign_trace_is_reported_without_its_path(tmp_path: Path) -> None:
    path = record(tmp_path, small_machine({"type": "fcfs"}))
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [*lines[:20], lines[20].replace(b'"s":20', b'"s":21'), *lines[21:]]
    path.write_bytes(b"".join(damaged))
    given = respond(ExplainRequest(run_folder=str(path.parent), requests=[len(lines) - 2]))
    assert given.reason == "failed"
    assert given.error
    assert str(tmp_path) not in given.error
