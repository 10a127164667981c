from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.replay.shrink.minimize import FirstKept, OnDemand, least_number, minimize_list, without_each


def _kept_if(holds: Callable[[list[int]], bool]) -> tuple[FirstKept[int], list[list[int]]]:
    tried: list[list[int]] = []

    def first_kept(lists: OnDemand[list[int]]) -> int | None:
        for index in range(len(lists)):
            tried.append(lists[index])
            if holds(lists[index]):
                return index
        return None

    return first_kept, tried


@given(st.integers(1, 60), st.sets(st.integers(0, 59), min_size=1, max_size=6))
def test_a_list_is_minimized_to_what_matters(size: int, needed: set[int]) -> None:
    needed = {each % size for each in needed}
    first_kept, _ = _kept_if(lambda items: needed <= set(items))
    assert minimize_list(list(range(size)), first_kept) == sorted(needed)
    assert without_each(list(range(size)), first_kept) == sorted(needed)


def test_what_is_left_is_1_minimal_even_if_the_condition_is_odd() -> None:
    """Sums that leave a rest: no part of a list says anything about another."""
    first_kept, tried = _kept_if(lambda items: sum(items) % 7 == 3)
    items = list(range(1, 39))
    assert sum(items) % 7 == 6
    items.append(4)
    found = minimize_list(items, first_kept)
    assert sum(found) % 7 == 3
    assert len(found) == 1 or not any(sum(found[:each] + found[each + 1 :]) % 7 == 3 for each in range(len(found)))
    assert [] not in tried


def test_one_item_is_kept() -> None:
    first_kept, tried = _kept_if(lambda items: True)
    assert minimize_list([5], first_kept) == without_each([5], first_kept) == [5]
    assert minimize_list([5, 6, 7], first_kept) == [5]
    assert without_each([5, 6, 7], first_kept) == [7]
    assert len(tried) == 3


@pytest.mark.parametrize(("least", "within"), [(1, 1), (37, 1), (100, 1), (37, 10)])
def test_the_least_number(least: int, within: int) -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number >= least

    found = least_number(1, 100, holds, within=within)
    assert least <= found < least + within
    assert len(tried) <= 8
    assert least_number(5, 5, lambda number: False) == 5
