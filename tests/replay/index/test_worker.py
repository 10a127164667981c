"""The process of one segment: what it answers."""

from __future__ import annotations

from pathlib import Path

from eventlm.replay.index.file import read_index
from eventlm.replay.index.segments import PartRequest
from eventlm.replay.index.worker import respond
from tests.replay.index.runs import BROKEN_RUN, GOLDEN_RUNS


def test_a_segment_begins_in_the_state_in_which_the_one_before_it_ends(random_runs: list[Path], tmp_path: Path) -> None:
    run = next(path for path in random_runs if len(list(path.glob("trace-*.jsonl"))) > 3)
    answers = [
        respond(PartRequest(segment=str(path), output=str(tmp_path / path.name)))
        for path in sorted(run.glob("trace-*.jsonl"))
    ]
    assert all(answer.is_whole for answer in answers)
    assert [a.state_at_end for a in answers[:-1]] == [a.state_at_start for a in answers[1:]]
    assert read_index(tmp_path / "trace-000000000000.jsonl").facts.next_s == answers[0].next_s


def test_a_run_that_diverges_has_no_part(tmp_path: Path) -> None:
    assert not respond(PartRequest(segment=str(BROKEN_RUN), output=str(tmp_path / "x"))).is_whole
    assert respond(PartRequest(segment=str(GOLDEN_RUNS[0]), output=str(tmp_path / "x"))).is_whole
