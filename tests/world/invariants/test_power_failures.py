"""What must be left of a log after a power failure."""

from __future__ import annotations

from tests.world.invariants.power_failures import is_left, num_lines_left

_BEFORE = {1: b"a\nb\n", 2: b"c\nd\ne\n", 3: b"f\n"}


def test_all_lines_are_left_where_nothing_was_taken() -> None:
    assert num_lines_left(_BEFORE, dict(_BEFORE)) == 6


def test_lines_before_a_hole_are_left() -> None:
    assert num_lines_left(_BEFORE, {**_BEFORE, 2: b"c\n\0\0e\n"}) == 3
    assert num_lines_left(_BEFORE, {**_BEFORE, 2: b"c\nd"}) == 3
    assert num_lines_left(_BEFORE, {**_BEFORE, 1: b""}) == 0


def test_lines_before_a_missing_file_are_left() -> None:
    assert num_lines_left(_BEFORE, {1: _BEFORE[1], 3: _BEFORE[3]}) == 2
    assert num_lines_left(_BEFORE, {1: _BEFORE[1], 2: _BEFORE[2]}) == 5
    assert num_lines_left(_BEFORE, {}) == 0


def test_a_log_may_begin_later() -> None:
    assert num_lines_left(_BEFORE, {2: _BEFORE[2], 3: _BEFORE[3]}) == 4


def test_a_file_may_have_lost_its_end() -> None:
    assert is_left(b"a\nb\n", b"a\nb")
    assert not is_left(b"a\nb\n", b"a")
    assert not is_left(b"a\nb\n", b"a\n\0\0")
