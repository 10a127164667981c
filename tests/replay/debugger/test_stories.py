"""Stories so far and whole, and what `eventlm explain` makes of the same requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import UsageError
from eventlm.replay.debugger.interrupt import Interrupt, InterruptedCommandError
from eventlm.replay.debugger.stories import explain_until
from eventlm.replay.explain.explainer import explain
from eventlm.replay.index import indexer
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER
from tests.replay.index.runs import GOLDEN_RUNS


@pytest.mark.parametrize("path", GOLDEN_RUNS, ids=lambda path: path.stem)
def test_whole_stories_are_those_of_explain(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 40)
    index = open_index(path)
    assert len(index.snapshots) > 2
    last = index.facts.next_s - 1
    for row in list(index.requests.rows())[::3]:
        request, sample = row["request"], row["index"]
        [expected] = explain(path, [(request, sample)]).explanations
        assert explain_until(index, request, sample, last, Interrupt()) == expected


def test_a_story_so_far_ends_at_the_position(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl")
    found = explain_until(index, 92, 2, 146, Interrupt())
    assert found.outcome == "unfinished"
    assert found.end_ns == 114_752_450
    assert len(found.preemptions) == 1
    assert explain_until(index, 92, 2, 120, Interrupt()).preemptions == []


def test_what_has_no_story(cache: None) -> None:
    index = open_index(FOLDER / "edf_tight.jsonl")
    with pytest.raises(UsageError, match="had not arrived by event 50; `story 92 whole` is all of it"):
        explain_until(index, 92, 0, 50, Interrupt())
    with pytest.raises(UsageError, match="there are no states"):
        explain_until(open_index(FOLDER / "edf_tight.jsonl", verify=False), 92, 0, 146, Interrupt())


def test_it_can_be_interrupted(cache: None) -> None:
    interrupt = Interrupt()
    interrupt.request()
    with pytest.raises(InterruptedCommandError):
        explain_until(open_index(FOLDER / "edf_tight.jsonl"), 92, 0, 146, interrupt)
