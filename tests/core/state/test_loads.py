"""The lightest replica is the one that a look at each would find."""

from __future__ import annotations

import random

from eventlm.core.state.loads import Loads


def test_of_equals_the_first_in_turn_counts() -> None:
    loads = Loads(10)
    for replica in (10, 11, 12):
        loads.set(replica, 5)
    assert [loads.lightest(start) for start in (10, 11, 12, 13)] == [10, 11, 12, 10]
    loads.set(11, 4)
    assert loads.lightest(12) == 11
    loads.set(11, None)
    assert loads.lightest(11) == 12


def test_random_loads_are_put_in_order() -> None:
    rng = random.Random(2)
    loads, known = Loads(7), dict.fromkeys(range(7, 107), 0)
    for replica in known:
        loads.set(replica, 0)
    for _ in range(500):
        replica = rng.randrange(7, 107)
        known[replica] = rng.randrange(6)
        loads.set(replica, known[replica])
        start = rng.randrange(7, 107)

        def turn(number: int, start: int = start) -> tuple[int, int]:
            return known[number], (number - start) % 100

        assert loads.lightest(start) == min(known, key=turn)
        some = rng.sample(sorted(known), rng.choice([1, 5, 24, 25, 60]))
        assert loads.lightest_of(sum(1 << number - 7 for number in some), start) == min(some, key=turn)
