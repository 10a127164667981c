"""Who holds the blocks of a replica."""

from __future__ import annotations

from msgspec import Struct

from eventlm.core.state.replica import Replica
from eventlm.types import SequenceId

#: Of many that share a prompt's beginning a few are named.
MAX_NAMED = 8


class BlockHolder(Struct, frozen=True, kw_only=True):
    """A resident and its blocks. num_own: those that nobody shares, and that it would free.

    num_sharing: sequences with which it shares others; shared_with: the first MAX_NAMED of them, by arrival.
    """

    sequence: SequenceId
    state: str
    num_blocks: int
    num_own: int
    num_sharing: int
    shared_with: list[SequenceId]


class PoolUse(Struct, frozen=True, kw_only=True):
    """The blocks of a replica: free, cached and held by nobody, held. Holders have the most of their own first."""

    replica: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    holders: list[BlockHolder]


def find_pool_use(replica: Replica) -> PoolUse:
    """Who holds the blocks now."""
    pool = replica.pool
    by_block: dict[int, list[int]] = {}
    for position, resident in enumerate(replica.running):
        for block in resident.block_table:
            by_block.setdefault(block, []).append(position)
    # The blocks of a shared beginning have the same holders, who are joined once for a resident, not once a block.
    numbers: dict[tuple[int, ...], int] = {}
    group_of = {block: numbers.setdefault(tuple(found), len(numbers)) for block, found in by_block.items()}
    groups = list(numbers)
    holders = []
    for resident in replica.running:
        own = [block for block in resident.block_table if pool.references[block] == 1]
        held_in = {group_of[block] for block in resident.block_table}
        positions = {position for number in held_in for position in groups[number]}
        sharing = sorted({replica.running[position].id for position in positions} - {resident.id})
        holders.append(
            BlockHolder(
                sequence=resident.id,
                state=resident.state.name.lower(),
                num_blocks=len(resident.block_table),
                num_own=len(own),
                num_sharing=len(sharing),
                shared_with=sharing[:MAX_NAMED],
            )
        )
    return PoolUse(
        replica=replica.index,
        num_blocks=pool.num_blocks,
        num_free=pool.num_available - pool.num_idle,
        num_cached=pool.num_idle,
        num_held=pool.num_blocks - pool.num_available,
        holders=sorted(holders, key=lambda holder: (-holder.num_own, holder.sequence)),
    )
