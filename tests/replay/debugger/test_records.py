"""Tables from the index alone."""

from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.replay.debugger.records import marks, recorded_sequence
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER


def test_marks_have_the_numbers_that_goto_takes(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl", verify=False)
    every = marks(index, [], 100)
    assert [row[0] for row in every.rows] == list(range(len(index.marks)))
    assert [row[1] for row in every.rows] == index.marks["s"].tolist()
    preempted = marks(index, ["preempted"], 100)
    assert preempted.title == "3 marks, 2 of them at or before event 100"
    assert [row[0] for row in preempted.rows] == [row[0] for row in every.rows if row[3] == "preempted"]
    with pytest.raises(UsageError, match="did you mean preempted"):
        marks(index, ["preemptd"], 0)


def test_a_sequence_before_during_and_after_its_life(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl", verify=False)
    assert "had not arrived" in recorded_sequence(index, 92, 2, 50).title
    assert "request 92 had not arrived" in recorded_sequence(index, 92, 0, 50).title
    assert recorded_sequence(index, 92, 2, 100).title == "request 92.2, by the log"
    found = recorded_sequence(index, 92, 2, 196)
    assert found.title == "request 92.2 had ended at event 196, with `length`"
    phases = ["queue", "prefill", "decode", "preempted", "recompute", "decode", "text_end"]
    assert [row[0] for row in found.rows] == phases
    assert found.notes == ["1 prompt token, 19 output tokens, 1 preemption"]
