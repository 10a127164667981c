"""How one replica is split into ranks, and how whole things are dealt out to them. Plain arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from eventlm.formatting import counted
from eventlm.types import ceil_div


class Place(NamedTuple):
    """Where a rank stands: its stage of the pipeline, its KV group, and its number among the group's tensor ranks."""

    stage: int
    group: int
    tensor: int


class Layout(Struct, frozen=True):
    """How many tensor ranks, stages and KV groups a replica has. Every stage has all groups, every group all tensor
    ranks; they are numbered in this order, tensor ranks first.
    """

    tensor: int = 1
    stages: int = 1
    groups: int = 1

    @property
    def num_ranks(self) -> int:
        """Worker processes of one replica."""
        return self.tensor * self.stages * self.groups

    @property
    def answering_rank(self) -> int:
        """The rank that answers launches: the first of the last stage, where tokens are drawn."""
        return self.rank_at(Place(self.stages - 1, 0, 0))

    def rank_at(self, place: Place) -> int:
        """The number of the rank at a place."""
        return (place.stage * self.groups + place.group) * self.tensor + place.tensor

    def place_of(self, rank: int) -> Place:
        """The place of a rank."""
        group, tensor = divmod(rank, self.tensor)
        return Place(*divmod(group, self.groups), tensor)

    def describe(self) -> str:
        """In words: "2 stages of 4 tensor ranks"; empty for one process."""
        sizes = ((self.stages, "stage"), (self.groups, "KV group"), (self.tensor, "tensor rank"))
        return " of ".join(counted(size, noun) for size, noun in sizes if size > 1)

    def name_of(self, rank: int) -> str:
        """A rank in words, with its place: "rank 3 of 4 (stage 1, tensor rank 1)"."""
        sizes = ((self.stages, "stage"), (self.groups, "KV group"), (self.tensor, "tensor rank"))
        at = [f"{noun} {number}" for (size, noun), number in zip(sizes, self.place_of(rank), strict=True) if size > 1]
        return f"rank {rank} of {self.num_ranks}" + (f" ({', '.join(at)})" if at else "")

    def ranks_of_stage(self, stage: int) -> range:
        """The ranks of a stage, in order."""
        size = self.groups * self.tensor
        return range(stage * size, (stage + 1) * size)


def deal_out(count: int, num_parts: int) -> list[range]:
    """Consecutive shares of `count` things; the first ones have one more where they do not come out even."""
    least, rest = divmod(count, num_parts)
    shares, first = [], 0
    for part in range(num_parts):
        size = least + (part < rest)
        shares.append(range(first, first + size))
        first += size
    return shares


def deal_out_granules(count: int, num_parts: int, granule: int) -> list[range]:
    """As `deal_out`, but every share begins at a multiple of `granule`; the last one may end with a part of one."""
    shares = deal_out(ceil_div(count, granule), num_parts)
    return [range(min(share.start * granule, count), min(share.stop * granule, count)) for share in shares]


def group_of(position: int, first_group: int, shard_tokens: int, num_groups: int) -> int:
    """The KV group that holds the token at `position` of a sequence that began on `first_group`."""
    return (first_group + position // shard_tokens) % num_groups


def tokens_of_shards(num_tokens: int, first_shard: int, shard_tokens: int, num_groups: int) -> int:
    """How many of the first `num_tokens` tokens of a context lie in shard `first_shard` and in every one that comes a
    multiple of `num_groups` after it.
    """
    num_whole, rest = divmod(num_tokens, shard_tokens)
    num_shards = len(range(first_shard, num_whole, num_groups))
    return num_shards * shard_tokens + (rest if num_whole % num_groups == first_shard else 0)


def context_capacity(num_blocks: int, block_size: int, num_groups: int = 1, shard_tokens: int = 0) -> int:
    """Tokens of the longest context that so many blocks in each KV group hold, one of which is never given away."""
    tokens = (num_blocks - 1) * block_size
    if num_groups == 1:
        return tokens
    num_whole, rest = divmod(tokens, shard_tokens)
    return num_whole * shard_tokens * num_groups + rest
