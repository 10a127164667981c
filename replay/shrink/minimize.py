"""Minimizing lists and numbers by trials, whatever they are of.

Lists by delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class OnDemand(Generic[Made]):
    """A list whose entries are made when they are asked for: most of many may never be."""

    def __init__(self, size: int, make: Callable[[int], Made]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Made:
        return self._make(index)


#: The index of the first of some lists that keeps the condition.
FirstKept = Callable[[OnDemand[list[Item]]], int | None]


def minimize_list(items: list[Item], first_kept: FirstKept[Item]) -> list[Item]:
    """A part of a list that keeps the condition and, if nothing depends on chance, from which no one item can go.

    The list itself is taken to keep it. Order stays. The empty list is not tried.
    """
    num_parts = 2
    while len(items) > 1:
        variants = _parts_and_rests(items, num_parts)
        kept = first_kept(variants)
        if kept is not None:
            items = variants[kept]
            num_parts = 2 if kept < num_parts else max(num_parts - 1, 2)
        elif num_parts < len(items):
            num_parts = min(2 * num_parts, len(items))
        else:
            break
    return items


def without_each(items: list[Item], first_kept: FirstKept[Item]) -> list[Item]:
    """The same, item by item, and again until none can go: the proof that a list is minimal."""
    index = 0
    while len(items) > 1:
        variants = _without_one(items, index)
        kept = first_kept(variants)
        if kept is None:
            if not index:
                break
            index = 0
        else:
            items = variants[kept]
            # What stands before it was needed then, and usually still is.
            index += kept
    return items


def _parts_and_rests(items: list[Item], num_parts: int) -> OnDemand[list[Item]]:
    """Each of the parts, then all without each of them. Of two halves, each is what is left without the other."""
    bounds = [len(items) * part // num_parts for part in range(num_parts + 1)]

    def make(index: int) -> list[Item]:
        low, high = bounds[index % num_parts], bounds[index % num_parts + 1]
        return items[low:high] if index < num_parts else items[:low] + items[high:]

    return OnDemand(2 * num_parts if num_parts > 2 else 2, make)


def _without_one(items: list[Item], first: int) -> OnDemand[list[Item]]:
    """Without the item at `first`, without the next, and so on."""
    return OnDemand(len(items) - first, lambda index: items[: first + index] + items[first + index + 1 :])


def least_number(low: int, high: int, holds: Callable[[int], bool], *, within: int = 1) -> int:
    """The smallest number from `low` to `high` that keeps the condition, if all larger ones do; else one at which it
    begins to be kept; or one not further above than `within`. `high` is taken to keep it.
    """
    if low >= high or holds(low):
        return min(low, high)
    while high - low > within:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
