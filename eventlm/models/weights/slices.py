"""What of a checkpoint's weights a smaller decoder has. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from eventlm.models.program import WeightKey
from eventlm.models.spec import ModelSpec

#: Of what is counted from 0 on: ascending, and none of them touch. Empty: all.
Ranges = tuple[range, ...]


class Slice(NamedTuple):
    """What is read of a weight `key` of a checkpoint: some of its rows, and of these some columns, in their order."""

    key: WeightKey
    rows: Ranges = ()
    columns: Ranges = ()


#: By the weights of the smaller decoder. Others of the checkpoint are not read.
Slices = Mapping[WeightKey, Slice]


class ModelPart(NamedTuple):
    """A decoder that is smaller than a checkpoint's, and where its weights are in that."""

    model: ModelSpec
    slices: Slices


def joined(ranges: Iterable[range]) -> Ranges:
    """The same numbers in as few ranges as there can be. The given ones are ascending and have no number twice."""
    found: list[range] = []
    for each in ranges:
        if not each:
            continue
        if found and found[-1].stop == each.start:
            each = range(found.pop().start, each.stop)
        found.append(each)
    return tuple(found)


def spread(ranges: Iterable[range], size: int) -> Ranges:
    """The elements of things of `size` each, of those that `ranges` number."""
    return joined(range(each.start * size, each.stop * size) for each in ranges)


def shifted(ranges: Iterable[range], offset: int) -> Ranges:
    """Each number plus `offset`."""
    return tuple(range(each.start + offset, each.stop + offset) for each in ranges)


def within(ranges: Iterable[range], bounds: range) -> Ranges:
    """Those of the numbers that are within bounds."""
    return tuple(
        range(max(each.start, bounds.start), min(each.stop, bounds.stop))
        for each in ranges
        if each.start < bounds.stop and bounds.start < each.stop
    )


def covering(ranges: Iterable[range], granule: int, count: int) -> Ranges:
    """The numbers, and with each all of its granule, of `count` there are. Ranges may overlap; they begin in order."""
    found: list[range] = []
    for each in ranges:
        start, stop = each.start // granule * granule, min(-(-each.stop // granule) * granule, count)
        if found and start <= found[-1].stop:
            before = found.pop()
            start, stop = before.start, max(stop, before.stop)
        found.append(range(start, stop))
    return tuple(found)


def places_in(ranges: Iterable[range], kept: Iterable[range]) -> Ranges:
    """Where the numbers are among those of `kept`, each of whose ranges has all or none of each range."""
    wanted, first = tuple(ranges), 0
    found: list[range] = []
    for each in kept:
        found += shifted(within(wanted, each), first - each.start)
        first += len(each)
    return joined(found)


def count_of(ranges: Iterable[range]) -> int:
    """How many numbers."""
    return sum(map(len, ranges))
