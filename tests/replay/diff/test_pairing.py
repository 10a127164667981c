"""Pairing requests of two runs whose positions, block names and sessions differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from eventlm.events import Arrived
from eventlm.replay.diff.pairing import pair_requests
from tests.made_requests import changed, make_arrival


def arrived(s: int, prompt_tokens: int = 32, blocks: Sequence[int] = (), **fields: Any) -> Arrived:
    return make_arrival(s=s, ts=s, prompt_tokens=prompt_tokens, blocks=list(blocks), max_tokens=8, **fields)


def elsewhere(requests: Sequence[Arrived], *, shift: int = 100) -> list[Arrived]:
    """The same as another run has them: other positions, other integers."""
    return [
        changed(
            request,
            s=request.s * 3 + shift,
            ts=request.ts * 7,
            blocks=[1000 - block for block in request.blocks],
            session=request.scheduling.session and 50 - request.scheduling.session,
            seed=str(request.s),
        )
        for request in requests
    ]


def draw(rng: random.Random, number: int) -> list[Arrived]:
    found = []
    for s in range(number):
        blocks = [rng.randrange(3), *range(10 * s + 10, 10 * s + 12)] if rng.random() < 0.5 else []
        if found and rng.random() < 0.3:
            blocks = [*rng.choice(found).blocks, 10 * s + 15]
        found.append(arrived(s, rng.choice([32, 48, 64]), blocks, session=rng.randrange(3), priority=rng.randrange(2)))
    return found


def test_the_same_requests_in_the_same_order() -> None:
    for seed in range(20):
        a = draw(random.Random(seed), 40)
        b = elsewhere(a)
        found = pair_requests(a, b)
        assert found.pairs == [(x.s, y.s) for x, y in zip(a, b, strict=True)]
        assert (found.only_a, found.only_b) == ([], [])


def test_blocks_tell_requests_apart_that_ask_for_the_same() -> None:
    a = [
        arrived(1, 32, [1, 2]),
        arrived(2, 48, [3, 4]),
        arrived(3, 64, [1, 2, 5, 6]),
        arrived(4, 64, [3, 4, 7, 8]),
    ]
    b = elsewhere([a[0], a[1], a[3], a[2]])
    assert pair_requests(a, b).pairs == [(1, b[0].s), (2, b[1].s), (3, b[3].s), (4, b[2].s)]


def test_sessions_do_too() -> None:
    a = [arrived(1, 32, session=1), arrived(2, 48, session=2), arrived(3, 64, session=1), arrived(4, 64, session=2)]
    b = elsewhere([a[0], a[1], a[3], a[2]])
    assert pair_requests(a, b).pairs == [(1, b[0].s), (2, b[1].s), (3, b[3].s), (4, b[2].s)]


def test_the_order_of_those_that_ask_for_something_else_does_not_matter() -> None:
    rng = random.Random(1)
    a = [arrived(s, 16 + s) for s in range(30)]
    shuffled = rng.sample(a, 30)
    b = elsewhere(shuffled)
    partner = {x.s: y.s for x, y in zip(shuffled, b, strict=True)}
    assert pair_requests(a, b).pairs == [(x.s, partner[x.s]) for x in a]


def test_what_is_left_over() -> None:
    a = [arrived(1, 16), arrived(2, 32), arrived(3, 32)]
    b = elsewhere([a[1], arrived(9, 77)])
    found = pair_requests(a, b)
    assert found.pairs == [(2, b[0].s)]
    assert (found.only_a, found.only_b) == ([1, 3], [b[1].s])
    assert pair_requests([], b).only_b == [b[0].s, b[1].s]
    assert pair_requests(a, []).only_a == [1, 2, 3]


def test_forgotten_blocks_another_limit_and_another_model_do_not_part_a_pair() -> None:
    a = [arrived(1, 32, [1, 2]), arrived(2, 48, [1, 2, 3])]
    b = [structs.replace(a[0], s=7), structs.replace(a[1], s=9, blocks=[8, 9, 10])]
    assert pair_requests(a, b).pairs == [(1, 7), (2, 9)]
    b = [changed(request, max_tokens=99, model="other") for request in b]
    assert pair_requests(a, b).pairs == [(1, 7), (2, 9)]
    assert pair_requests(a, [changed(b[0], priority=1)]).pairs == []
