"""What an index answers: positions, gauges at a drain, members of a step, and the core near any event."""

from __future__ import annotations

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Fact, Marker
from eventlm.replay.index import indexer
from eventlm.replay.index.open import open_index
from tests.replay.index.runs import GOLDEN_RUNS


def test_the_core_at_every_event_is_that_of_a_straight_replay(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 40)
    for path in GOLDEN_RUNS[1:3]:
        index = open_index(path)
        core = index.new_core()
        with LogReader(path) as reader:
            events = [line.event() for line in reader]
        for event in events:
            if isinstance(event, Fact | Marker):
                core.apply(event)
            if event.s % 3 == 0:
                near = index.core_at(event.s + 1)
                assert near.next_seq == core.next_seq
                assert near.digests() == core.digests()


def test_positions(own_cache: None) -> None:
    index = open_index(GOLDEN_RUNS[0])
    for drain, row in enumerate(index.drains.rows()):
        assert index.drain_of(row["s"]) == drain
        assert index.drain_before(row["next_s"]) == drain
        assert index.drain_before(row["next_s"] - 1) == drain - 1
        assert index.drain_at(row["ts"]) == drain
        assert index.drain_at(row["ts"] - 1) == drain - 1
        assert index.end_of_drain(row["next_s"] - 1) == row["s"]
    assert index.drain_of(index.facts.next_s) == len(index.drains)
    assert index.end_of_drain(index.facts.next_s) is None
    assert index.find_row(10**9) is None
    step = index.steps.row(3)
    assert index.step_row(step["replica"], step["step"]) == 3
    assert index.gauges_at(-1) == {}


def test_without_verification_there_are_no_states(own_cache: None) -> None:
    index = open_index(GOLDEN_RUNS[0], verify=False)
    with pytest.raises(UsageError, match=r"the run was not verified .*there are no states"):
        index.core_at(50)
