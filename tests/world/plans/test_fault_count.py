"""Counting the faults that were set, and those that struck."""

from __future__ import annotations

from collections import Counter

from tests.world.plans.fault_count import FaultCount
from tests.world.plans.faults import FaultKind

_AT_ONCE, _LATER = FaultKind(1, lambda *_: True), FaultKind(1, lambda *_: True, ("full", "no room"))


def test_a_fault_strikes_once_and_when_something_meets_it() -> None:
    hits = Counter({"full": 3})
    count = FaultCount(hits)
    for num_hits in (0, 2, 1, 0):
        count.add("full disk", _LATER)
        hits["no room to create"] += num_hits
    counts = count.counts()
    assert (counts["faults_set"], counts["faults"]) == ({"full disk": 4}, {"full disk": 2})
    assert counts["hits"] == {"full": 3, "no room to create": 3}


def test_one_without_hits_strikes_at_once() -> None:
    count = FaultCount(Counter())
    count.add("kill worker", _AT_ONCE)
    assert count.counts() == {"faults_set": {"kill worker": 1}, "faults": {"kill worker": 1}, "hits": {}}


def test_those_that_are_drawn_where_they_strike_are_set_and_struck() -> None:
    counts = FaultCount(Counter({"backend: late": 2})).counts()
    assert counts == {"faults_set": {"backend: late": 2}, "faults": {"backend: late": 2}, "hits": {}}
