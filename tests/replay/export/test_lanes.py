"""Lanes: no two slices of one overlap, and there are no more than overlap at once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.replay.export.lanes import Lanes


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_slices_that_overlap_have_lanes_of_their_own(slices: list[tuple[int, int]]) -> None:
    """Slices begin and end in order of time, as they do in a log."""
    lanes = Lanes()
    spans = sorted((start, start + length) for start, length in slices)
    open_: list[tuple[int, int]] = []
    drawn: dict[int, list[tuple[int, int]]] = {}
    most = 0
    for start, end in spans:
        for ended, lane in sorted(open_):
            if ended <= start:
                lanes.give(lane, ended)
                open_.remove((ended, lane))
        lane = lanes.take(start)
        drawn.setdefault(lane, []).append((start, end))
        open_.append((end, lane))
        most = max(most, len(open_))
    for own in drawn.values():
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    assert len(lanes) == most


def test_a_lane_that_ended_later_than_the_slice_began_is_passed_over() -> None:
    lanes = Lanes()
    first = lanes.take(0)
    lanes.give(first, 10)
    second = lanes.take(5)
    assert second != first
    lanes.give(second, 12)
    assert lanes.take(10) == first
    assert lanes.take(12) == second
