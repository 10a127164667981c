"""Most of the prompt, unless that replica has much more to do."""

from __future__ import annotations

import random

from eventlm.core.plugin import RequestView
from eventlm.policies.least_loaded import LeastLoaded
from eventlm.policies.prefix_affinity import PrefixAffinity
from tests.policies.views import replica

QUESTION = RequestView(1, 0, 1, 1000)


def test_the_longest_prefix_wins_while_its_replica_is_not_overloaded() -> None:
    # 1,000 tokens to compute elsewhere outweigh 8,000 tokens of load.
    for load, home in ((0, 1), (7999, 1), (8001, 0)):
        views = [replica(0), replica(1, prefix_tokens=1000, admitted_tokens=load // 2, waiting_tokens=load - load // 2)]
        assert PrefixAffinity().route(QUESTION, views) == home


def test_only_what_is_shared_in_addition_counts() -> None:
    views = [replica(0, prefix_tokens=990), replica(1, prefix_tokens=1000, admitted_tokens=81)]
    assert PrefixAffinity().route(QUESTION, views) == 0
    assert PrefixAffinity(weight=9).route(QUESTION, views) == 1


def test_without_a_prefix_or_a_weight_it_is_the_least_loaded() -> None:
    rng = random.Random(3)
    for _ in range(200):
        loads = [rng.randrange(4) for _ in range(4)]
        plain = [replica(index, admitted_tokens=load) for index, load in enumerate(loads)]
        cached = [
            replica(index, admitted_tokens=load, prefix_tokens=rng.randrange(3)) for index, load in enumerate(loads)
        ]
        least = LeastLoaded().route(QUESTION, plain)
        assert least is not None
        for router, views in ((PrefixAffinity(), plain), (PrefixAffinity(weight=0), cached)):
            home = router.route(QUESTION, views)
            assert home is not None
            assert loads[home] == loads[least]


def test_equals_take_turns() -> None:
    views = [replica(index, prefix_tokens=7) for index in range(3)]
    assert [PrefixAffinity().route(RequestView(9, ordinal, 1, 10), views) for ordinal in range(4)] == [0, 1, 2, 0]


def test_the_answer_is_one_of_the_replicas_that_are_up() -> None:
    rng = random.Random(4)
    for _ in range(200):
        views = [
            replica(index, admitted_tokens=rng.randrange(40), prefix_tokens=rng.randrange(5))
            for index in rng.sample(range(9), 4)
        ]
        assert PrefixAffinity().route(QUESTION, views) in {view.index for view in views}


def test_no_replica_is_left_out_for_ever_even_if_one_has_every_prefix() -> None:
    loads = [0, 0, 0]
    for _ in range(100):
        views = [
            replica(index, admitted_tokens=load, prefix_tokens=1000 if index == 0 else 0)
            for index, load in enumerate(loads)
        ]
        home = PrefixAffinity().route(QUESTION, views)
        assert home is not None
        loads[home] += 1000
        assert max(loads) - min(loads) <= 9 * 1000
    assert min(loads) > 0
