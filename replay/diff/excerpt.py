"""What two launches of two runs do not have in common.

A launch has a row for everybody that runs, and of two that differ most rows are alike. An excerpt leaves those out and
counts them, and the fields in which nothing differs. Requests are compared by their pair, blocks by their number: see
`eventlm.replay.diff.comparable`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from eventlm.events import Event, Launched
from eventlm.replay.diff.comparable import ComparableNames
from eventlm.replay.verify.divergence import as_object

#: Which field is told of by which elements; all others of a launch are single values.
_LISTS = ("decodes", "chunks", "most", "blocks", "forget")


def excerpts(
    event_a: Event | None, event_b: Event | None, names_a: ComparableNames, names_b: ComparableNames
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The JSON objects of both, of two launches without what is alike. A list ends with `N alike` for what it lacks."""
    object_a = as_object(event_a) if event_a is not None else None
    object_b = as_object(event_b) if event_b is not None else None
    if object_a is None or object_b is None or not isinstance(event_a, Launched) or not isinstance(event_b, Launched):
        return object_a, object_b
    elements_a, elements_b = _elements(event_a, names_a), _elements(event_b, names_b)
    for name in _LISTS:
        compared = elements_a[name], elements_b[name]
        left_a = _left(object_a.pop(name, []), *compared)
        left_b = _left(object_b.pop(name, []), *compared[::-1])
        if compared[0] != compared[1]:
            object_a[name], object_b[name] = left_a, left_b
    return object_a, object_b


def _left(shown: list[Any], own: Sequence[Hashable], others: Sequence[Hashable]) -> list[Any]:
    """Of a list's elements those that the other does not have; all of them if only the order is another."""
    if Counter(own) == Counter(others):
        return shown
    alike = Counter(own) & Counter(others)
    left = []
    for each, element in zip(shown, own, strict=True):
        if alike[element]:
            alike[element] -= 1
        else:
            left.append(each)
    num_alike = len(shown) - len(left)
    return [*left, f"{num_alike:,} alike"] if num_alike else left


def _elements(event: Launched, names: ComparableNames) -> dict[str, list[Hashable]]:
    """What is compared of each list, element by element."""
    rows = [(names.of(row[0]), row[1]) for row in (*event.decodes, *event.chunks)]
    return {
        "decodes": [(names.of(row[0]), *row[1:]) for row in event.decodes],
        "chunks": [(names.of(row[0]), *row[1:]) for row in event.chunks],
        "most": list(zip(rows, event.most, strict=False)),
        "blocks": [(rows[row], place, len(blocks)) for row, place, blocks in event.blocks],
        "forget": [(names.of(request), index) for request, index in event.forget],
    }
