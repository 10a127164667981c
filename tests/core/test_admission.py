"""What a sequence takes when it is admitted, and how its hits are found while it waits."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.core.plugin import Policy
from eventlm.core.state.block_pool import Node
from eventlm.policies.edf import Edf
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.lrs import Lrs
from tests.core.rig import MILLISECOND, Rig


def test_admission_reserves_the_whole_prompt_and_one_block() -> None:
    rig = Rig(max_num_batched_tokens=4)
    seq = rig.arrive(14, 20)
    assert len(rig.sequence(seq).block_table) == 5
    assert rig.state.replicas[0].pool.num_available == 27


class CountedTree(dict[int, Node]):
    """A pool's tree that counts the nodes that are looked up."""

    num_visits = 0

    def get(self, name: int, default: Node | None = None) -> Node | None:  # type: ignore[override]
        self.num_visits += 1
        return super().get(name, default)


class CountedReferences(list[int]):
    """A pool's reference counts, which count how often they are read."""

    num_visits = 0

    def __getitem__(self, block: int) -> int:  # type: ignore[override]
        self.num_visits += 1
        return super().__getitem__(block)


def visits_of_a_step(policy: Policy, num_cached_blocks: int) -> int:
    """Nodes that the plan of one step visits while 16 sequences with a cached prefix wait for blocks."""
    prefix = list(range(1, num_cached_blocks + 1))
    prompt_tokens = 4 * num_cached_blocks + 3
    rig = Rig(
        policy=policy,
        num_blocks=num_cached_blocks + 8,
        max_model_len=4 * num_cached_blocks + 28,
        max_num_batched_tokens=prompt_tokens,
        max_num_seqs=16,
    )
    rig.arrive(prompt_tokens, 25, blocks=prefix)
    rig.complete()
    # It needs eight blocks beside the prefix, and there are never as many.
    for _ in range(16):
        rig.arrive(prompt_tokens + 20, 5, blocks=prefix)
    for _ in range(2):
        rig.complete()
    pool = rig.state.replicas[0].pool
    tree = pool.tree = CountedTree(pool.tree)
    references = pool.references = CountedReferences(pool.references)
    done = rig.completion()
    rig.core.apply(structs.replace(done, s=rig.core.next_seq, ts=rig.now_ns + MILLISECOND, p=1))
    assert rig.state.num_waiting == 16
    return tree.num_visits + references.num_visits


@pytest.mark.parametrize("policy", [Fcfs(), Edf(), Lrs()])
def test_the_hits_of_those_that_wait_are_not_looked_up_from_the_root_in_every_plan(policy: Policy) -> None:
    # Of each one or two, and some more to find the first idle block by bisection; from the root it would be 2048.
    assert 16 <= visits_of_a_step(policy, num_cached_blocks=1024) < 16 * 12
