"""Arithmetic of ranges against sets of numbers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eventlm.models.weights.slices import count_of, covering, joined, places_in, shifted, spread, within

COUNT = 40


def ranges_of(numbers: set[int]) -> tuple[range, ...]:
    return joined(range(number, number + 1) for number in sorted(numbers))


def numbers_of(ranges: tuple[range, ...]) -> list[int]:
    return [*itertools.chain(*ranges)]


NUMBERS = st.sets(st.integers(0, COUNT - 1))
RANGES = NUMBERS.map(ranges_of)


@given(NUMBERS)
def test_joined_ranges_do_not_touch(numbers: set[int]) -> None:
    ranges = ranges_of(numbers)
    assert numbers_of(ranges) == sorted(numbers)
    assert count_of(ranges) == len(numbers)
    assert all(first.stop < second.start for first, second in itertools.pairwise(ranges))


@given(RANGES, st.integers(1, 5), st.integers(0, 9))
def test_spread_and_shifted(ranges: tuple[range, ...], size: int, offset: int) -> None:
    elements = [number * size + element for number in numbers_of(ranges) for element in range(size)]
    assert numbers_of(spread(ranges, size)) == elements
    assert numbers_of(shifted(ranges, offset)) == [number + offset for number in numbers_of(ranges)]


@given(RANGES, st.integers(0, COUNT), st.integers(0, COUNT))
def test_within(ranges: tuple[range, ...], start: int, stop: int) -> None:
    bounds = range(start, stop)
    assert numbers_of(within(ranges, bounds)) == [number for number in numbers_of(ranges) if number in bounds]


@given(RANGES, st.integers(1, 7))
def test_covering_and_places(ranges: tuple[range, ...], granule: int) -> None:
    kept = covering(ranges, granule, COUNT)
    granules = {number // granule for number in numbers_of(ranges)}
    assert numbers_of(kept) == [number for number in range(COUNT) if number // granule in granules]
    places = numbers_of(places_in(ranges, kept))
    assert [numbers_of(kept)[place] for place in places] == numbers_of(ranges)
