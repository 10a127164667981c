"""Where the blocks of a sequence lie in a replica of several KV groups.

The first shard of a context, `kv_shard_tokens` long, lies in one group, each further one in the next group, and after
the last group comes the first again. A row is computed by all groups that hold a part of its context.
"""

from __future__ import annotations

from typing import NamedTuple

from eventlm.config import CoreConfig
from eventlm.core.plugin import StepLoad
from eventlm.core.shards import group_of, tokens_of_shards
from eventlm.core.state.block_pool import BlockPool


def group_at(config: CoreConfig, first_group: int, block: int) -> int:
    """The group of the block at index `block` of a table that begins in `first_group`."""
    return group_of(block * config.block_size, first_group, config.kv_shard_tokens or config.block_size, config.groups)


def blocks_by_group(config: CoreConfig, first_group: int, first: int, last: int) -> list[int]:
    """How many of the blocks from index `first` to before `last` of a table lie in each group."""
    counts = [0] * config.groups
    for block, end in _runs(config, first, last):
        counts[group_at(config, first_group, block)] += end - block
    return counts


def allocate(config: CoreConfig, pool: BlockPool, first_group: int, first: int, last: int) -> list[int]:
    """Blocks for the indices from `first` to before `last` of a table. The caller has checked that they are there."""
    blocks: list[int] = []
    for block, end in _runs(config, first, last):
        blocks += pool.allocate(end - block, group_at(config, first_group, block))
    return blocks


def _runs(config: CoreConfig, first: int, last: int) -> list[tuple[int, int]]:
    """The indices from `first` to before `last`, divided where shards end."""
    blocks_per_shard = (config.kv_shard_tokens or 0) // config.block_size or last
    runs = []
    while first < last:
        end = min((first // blocks_per_shard + 1) * blocks_per_shard, last)
        runs.append((first, end))
        first = end
    return runs


def tokens_in_group(config: CoreConfig, first_group: int, group: int, num_tokens: int) -> int:
    """How many of the first `num_tokens` tokens of a context that begins in `first_group` lie in `group`."""
    first_shard = (group - first_group) % config.groups
    return tokens_of_shards(num_tokens, first_shard, config.kv_shard_tokens or num_tokens, config.groups)


class GroupShares(NamedTuple):
    """What each of the groups that compute a row holds of its context: (group, tokens). own: the one that stores the
    keys and values of the row.
    """

    contexts: list[tuple[int, int]]
    own: int

    def largest(self, loads: list[StepLoad]) -> StepLoad:
        """The load of the group that has the most tokens so far."""
        return max((loads[group] for group, _ in self.contexts), key=lambda load: load.num_tokens)

    def room(self, loads: list[StepLoad]) -> int:
        """How many more tokens all of the groups may have in a step."""
        load = self.largest(loads)
        return load.budget_tokens - load.num_tokens

    def add_decode(self, loads: list[StepLoad]) -> None:
        """Count a decode in every group that computes it."""
        for group, num_tokens in self.contexts:
            load = loads[group]
            load.decode_tokens += 1
            load.num_decodes += 1
            load.context_tokens += num_tokens

    def add_chunk(self, loads: list[StepLoad], num_tokens: int) -> None:
        """Count a chunk after these contexts in every group that computes it."""
        for group, before in self.contexts:
            loads[group].add_chunk(before, num_tokens, own_tokens=num_tokens if group == self.own else 0)


def shares_of(config: CoreConfig, first: int, num_tokens: int) -> GroupShares:
    """The groups that compute a row after `num_tokens` other tokens of a sequence that began in the group `first`."""
    own = group_of(num_tokens, first, config.kv_shard_tokens or config.block_size, config.groups)
    contexts = [(group, tokens_in_group(config, first, group, num_tokens)) for group in range(config.groups)]
    return GroupShares([share for share in contexts if share[1] or share[0] == own], own)


def left_in_shard(config: CoreConfig, num_tokens: int) -> int:
    """Most tokens of a chunk after `num_tokens` others: it crosses no boundary of a shard."""
    shard = config.kv_shard_tokens or config.max_model_len
    return shard - num_tokens % shard


def least_held(pool: BlockPool) -> int:
    """The group whose residents hold the least: the one with the least to read in a step."""
    return max(range(pool.num_groups), key=lambda group: (pool.available_in(group), -group))
