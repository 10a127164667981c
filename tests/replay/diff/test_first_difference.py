"""Excerpts of two launches: what is alike is left out and counted, whatever its requests and blocks are called."""

from __future__ import annotations

from typing import Any

from eventlm.events import Finished, Launched
from eventlm.replay.diff.comparable import ComparableNames
from eventlm.replay.diff.first_difference import excerpts

#: Five requests that both runs have, whose seqs in B are 100 more.
NAMES_A = ComparableNames("A", {10 + number: number for number in range(1, 6)}, 0)
NAMES_B = ComparableNames("B", {110 + number: number for number in range(1, 6)}, 0)


def launch(shift: int = 0, **changes: Any) -> Launched:
    """Three decodes and a chunk; of requests whose seqs are `shift` more."""
    fields: dict[str, Any] = {
        "s": 50 + shift,
        "replica": 0,
        "epoch": 1,
        "step": 7,
        "decodes": [(11 + shift, 0, 40, 0), (12 + shift, 0, 40, 0), (13 + shift, 0, 40, 0)],
        "chunks": [(14 + shift, 0, 0, 64, 1)],
        "blocks": [(0, 2, [5 + shift]), (3, 0, [6 + shift, 7 + shift])],
        "num_tokens": 67,
        "predicted_ns": 1000,
    }
    return Launched(**fields | changes)


def lists(found: dict[str, Any] | None) -> dict[str, Any]:
    assert found is not None
    return {name: value for name, value in found.items() if isinstance(value, list)}


def test_what_is_alike_is_left_out() -> None:
    found_a, found_b = excerpts(launch(), launch(100, num_tokens=68), NAMES_A, NAMES_B)
    assert lists(found_a) == lists(found_b) == {}
    assert found_a is not None
    assert found_b is not None
    assert (found_a["s"], found_a["num_tokens"], found_b["s"], found_b["num_tokens"]) == (50, 67, 150, 68)


def test_the_rest_is_counted() -> None:
    other = launch(100, decodes=[(111, 0, 40, 0), (113, 0, 40, 0)], blocks=[(0, 2, [9]), (2, 0, [8, 3])])
    found_a, found_b = excerpts(launch(), other, NAMES_A, NAMES_B)
    # The blocks are of the same rows, though B's chunk stands one row earlier.
    assert lists(found_a) == {"decodes": [[12, 0, 40, 0], "2 alike"]}
    assert lists(found_b) == {"decodes": ["2 alike"]}


def test_another_chunk_and_one_of_them_without_any() -> None:
    found_a, found_b = excerpts(launch(), launch(100, chunks=[(114, 0, 0, 32, 0)]), NAMES_A, NAMES_B)
    assert lists(found_a) == {"chunks": [[14, 0, 0, 64, 1]]}
    assert lists(found_b) == {"chunks": [[114, 0, 0, 32, 0]]}
    found_a, found_b = excerpts(launch(), launch(100, chunks=[], blocks=[(0, 2, [5])]), NAMES_A, NAMES_B)
    assert lists(found_a) == {"chunks": [[14, 0, 0, 64, 1]], "blocks": [[3, 0, [6, 7]], "1 alike"]}
    assert lists(found_b) == {"chunks": [], "blocks": ["1 alike"]}


def test_another_order_is_shown_whole() -> None:
    decodes = [(112, 0, 40, 0), (111, 0, 40, 0), (113, 0, 40, 0)]
    blocks = [(1, 2, [5]), (3, 0, [6, 7])]
    found_a, found_b = excerpts(launch(), launch(100, decodes=decodes, blocks=blocks), NAMES_A, NAMES_B)
    assert lists(found_a) == {"decodes": [[11, 0, 40, 0], [12, 0, 40, 0], [13, 0, 40, 0]]}
    assert lists(found_b) == {"decodes": [[*row] for row in decodes]}


def test_all_else_is_shown_whole() -> None:
    end = Finished(s=9, request=11, index=0, reason="length", position=5, cached_tokens=0)
    assert excerpts(None, end, NAMES_A, NAMES_B)[0] is None
    found_a, found_b = excerpts(launch(), end, NAMES_A, NAMES_B)
    assert set(lists(found_a)) == {"decodes", "chunks", "blocks"}
    assert found_b is not None
    assert found_b["position"] == 5
