"""Gaps of logs must match what was reported."""

from __future__ import annotations

import pytest

from tests.world.invariants.checks import BrokenInvariant, Checks
from tests.world.invariants.losses import ToldLosses

_LOST = "cannot write to the trace /runs/a/trace.jsonl: No space left on device; events are lost until it can be"
_LAGS = "the trace /runs/a/trace.jsonl lags: a write took longer than 20 ms; events are lost until the disk answers"
_FOUND = "the trace /runs/a/trace.jsonl is written again; events 10 to 20 are not in it: No space left on device"
_NONE = "the trace /runs/a/trace.jsonl is written again; no event was lost"
_GAP = "/runs/a has a gap: events 10 to 20 were not recorded (No space left on device)"


def _told(*lines: str) -> ToldLosses:
    told = ToldLosses(Checks())
    for line in lines:
        told.hear(line)
    return told


def test_gaps_are_just_those_that_were_told() -> None:
    _told(_LOST, _FOUND, _LAGS, _NONE).check_gaps("a", [_GAP], was_killed=False)
    _told("another line").check_gaps("a", ["/runs/a ends without an end"], was_killed=False)


@pytest.mark.parametrize(
    ("lines", "warnings"),
    [((), [_GAP]), ((_LOST,), [_GAP]), ((_LAGS, _NONE), [_GAP]), ((_LOST, _FOUND), [_GAP, _GAP.replace("10", "15")])],
    ids=["none was told", "its end was not told", "none was lost", "another one"],
)
def test_an_untold_gap_is_found(lines: tuple[str, ...], warnings: list[str]) -> None:
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(*lines).check_gaps("a", warnings, was_killed=False)


def test_a_told_gap_that_the_log_has_not_is_found() -> None:
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(_LOST, _FOUND).check_gaps("a", [], was_killed=True)


def test_a_gap_that_was_removed_with_its_segment_need_not_be_there() -> None:
    _told(_LOST, _FOUND).check_gaps("a", [], was_killed=False, first_s=21)
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(_LOST, _FOUND).check_gaps("a", [], was_killed=False, first_s=20)


def test_a_gap_of_another_run_is_no_excuse() -> None:
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(_LOST, _FOUND).check_gaps("b", [_GAP], was_killed=True)


def test_a_server_may_be_killed_before_it_tells_that_it_writes_again() -> None:
    _told(_LOST).check_gaps("a", [_GAP], was_killed=True)
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(_LOST, _FOUND).check_gaps("a", [_GAP, _GAP], was_killed=True)


def test_an_end_without_a_beginning_is_found() -> None:
    with pytest.raises(BrokenInvariant, match="gaps are reported"):
        _told(_FOUND)


def test_losses_are_those_of_the_present() -> None:
    told = _told(_LOST)
    assert told.of("a").is_lossy
    assert not told.of("b").is_lossy
    told.hear(_FOUND)
    assert not told.of("a").is_lossy
