"""The index answers what a look at every replica would."""

from __future__ import annotations

import random

from eventlm.core.state.prefix_index import Holder, PrefixGroup, PrefixIndex, bits_of


def test_groups_are_by_the_length_of_the_prefix_that_replicas_have() -> None:
    index = PrefixIndex()
    Holder(index.held, 0).add([1, 2, 3])
    Holder(index.held, 2).add([1])
    Holder(index.awaited, 2).add([2])
    Holder(index.awaited, 5).add([7])
    assert index.groups([1, 2, 3, 4], 4) == [PrefixGroup(0b100, 2), PrefixGroup(0b001, 3)]
    assert index.groups([1, 2, 3, 4], 2) == [PrefixGroup(0b101, 2)]
    assert index.groups([8, 1], 2) == index.groups([], 0) == index.groups([1], 0) == []
    # Behind a block that nobody has there is no prefix.
    assert index.groups([8, 7], 2) == []


def test_random_holders_are_found() -> None:
    rng = random.Random(1)
    for _ in range(200):
        index, num_replicas = PrefixIndex(), rng.choice([1, 3, 70])
        names = [rng.randrange(1, 20) for _ in range(rng.randrange(6))]
        had = [set(rng.sample(range(1, 20), rng.randrange(19))) for _ in range(num_replicas)]
        for position, has in enumerate(had):
            holder = Holder(index.held, position)
            holder.add(range(1, 20))
            holder.drop(name for name in range(1, 20) if name not in has)
        lengths = [next((i for i, name in enumerate(names) if name not in has), len(names)) for has in had]
        found = {
            position: group.num_blocks
            for group in index.groups(names, len(names))
            for position in bits_of(group.replicas)
        }
        assert found == {position: length for position, length in enumerate(lengths) if length}
        assert index.held == {
            name: mask for name in range(1, 20) if (mask := sum((name in has) << i for i, has in enumerate(had)))
        }
