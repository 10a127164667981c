"""What a rank of one KV group has of a step: the rows that it computes, and its shards of their contexts.

A group has all weights of its stage, and of each context the keys and values of every K-th shard. It computes the rows
of whose contexts it has a part, those whose tokens it is to store among them. So a row of a long context is computed by
several groups, which put their attention together layer by layer. In the last stage tokens are drawn in the first
group, to which the others hand over what it lacks.

Shapes: T tokens of a launch, H hidden size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.core.shards import tokens_of_shards
from eventlm.kernels.cpu.decoder import DecoderSharers
from eventlm.types import ceil_div
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.sequence_table import DesyncError, Row


class OwnRow(NamedTuple):
    """A row that the group computes, after `start` others.

    number: in the launch. holders: the groups that compute it, that of the first shard first. first_shard: the number
    of the first shard that this group has. blocks: of its shards up to the row's end, as numbered in this group.
    num_before: tokens before the row's in its shards. is_stored: whether the row's tokens go into them.
    first_shared: of a row that several groups compute, its first token among those of all such rows; -1 of others.
    """

    row: Row
    number: int
    holders: tuple[int, ...]
    first_shard: int
    blocks: array[int]
    num_before: int
    is_stored: bool
    first_shared: int


class GroupStep(NamedTuple):
    """A step as a group sees it: its rows, and how many tokens the rows have that several groups compute."""

    own: list[OwnRow]
    num_shared: int

    @property
    def rows(self) -> list[Row]:
        """Those that it computes, in the order of the launch."""
        return [each.row for each in self.own]


class KVGroup:
    """The group of the rank that `setup` describes. exchange: with the ranks of its place in the other groups."""

    def __init__(self, setup: WorkerSetup, exchange: RankExchange) -> None:
        self.exchange = exchange
        self.size, self.number = exchange.size, exchange.rank
        self.shard_tokens = setup.kv_shard_tokens
        self._num_blocks, self._block_size = setup.num_blocks, setup.block_size

    @property
    def own_blocks(self) -> range:
        """The numbers of its blocks among those of all groups."""
        return range(self.number * self._num_blocks, (self.number + 1) * self._num_blocks)

    @property
    def sharers(self) -> DecoderSharers:
        """For a compiled decoder."""
        return DecoderSharers(self.exchange.group, self.shard_tokens)

    def num_own(self, num_tokens: int, first_shard: int) -> int:
        """How many of the first `num_tokens` tokens of a context lie here, where the first shard has this number."""
        return tokens_of_shards(num_tokens, first_shard, self.shard_tokens, self.size)

    def share(self, rows: Seq[Row]) -> GroupStep:
        """What it has of these rows. Raises DesyncError if their blocks lie in other groups than they must."""
        own, num_shared = [], 0
        for number, row in enumerate(rows):
            first_group = row.sequence.block_table[0] // self._num_blocks
            num_holders = self._num_holders(row)
            first_shard = (self.number - first_group) % self.size
            if first_shard < num_holders:
                holders = tuple((first_group + shard) % self.size for shard in range(num_holders))
                own.append(self._own_row(row, number, holders, first_shard, num_shared if num_holders > 1 else -1))
            if num_holders > 1:
                num_shared += row.num_tokens
        return GroupStep(own, num_shared)

    def _num_holders(self, row: Row) -> int:
        return min(ceil_div(row.start + row.num_tokens, self.shard_tokens), self.size)

    def _own_row(self, row: Row, number: int, holders: tuple[int, ...], first_shard: int, first_shared: int) -> OwnRow:
        is_stored = row.start // self.shard_tokens % self.size == first_shard
        blocks = self._blocks(row, first_shard)
        return OwnRow(
            row, number, holders, first_shard, blocks, self.num_own(row.start, first_shard), is_stored, first_shared
        )

    def _blocks(self, row: Row, first_shard: int) -> array[int]:
        table, length = row.sequence.block_table, ceil_div(row.start + row.num_tokens, self._block_size)
        in_shard = self.shard_tokens // self._block_size
        blocks = array("i")
        for begin in range(first_shard * in_shard, length, self.size * in_shard):
            blocks += table[begin : min(begin + in_shard, length)]
        numbers = np.frombuffer(blocks, dtype=np.int32)
        numbers -= self.own_blocks.start
        if numbers.min() < 0 or numbers.max() >= self._num_blocks:
            name = f"{row.sequence.id.request}/{row.sequence.id.index}"
            raise DesyncError(f"sequence {name}: shard {first_shard} has blocks of another group")
        return blocks

    def gather_hidden(self, rows: Seq[Row], step: GroupStep, own_TH: Tensor) -> Tensor:
        """What the last layer gave of a launch's tokens, in the first group; own_TH: of its own rows.

        There it is [T, H], with zeros where a token is not asked for. All groups call it; others get what they have.
        """
        told: list[list[tuple[int, int, int]]] = [[] for _ in range(self.size)]
        offset = 0
        for row in rows:
            first_group = row.sequence.block_table[0] // self._num_blocks
            # The first group has a row if it is one of the holders.
            if -first_group % self.size >= self._num_holders(row) and (count := _num_asked(row)):
                told[first_group].append((offset, row.num_tokens, count))
            offset += row.num_tokens
        all_TH = own_TH
        if self.number == 0 and len(own_TH) < offset:
            all_TH = own_TH.new_zeros(offset, own_TH.shape[1])
            all_TH[self._places(rows, step)] = own_TH
        most = max(sum(count for *_, count in each) for each in told)
        if not most:
            return all_TH
        mine = own_TH.new_zeros(most, own_TH.shape[1])
        if told[self.number]:
            mine[: sum(count for *_, count in told[self.number])] = own_TH[self._told(rows, step, told[self.number])]
        found = self.exchange.gather(mine)
        if self.number == 0:
            for group, spans in enumerate(told):
                places = _ends(spans)
                all_TH[places] = found[group, : len(places)]
        return all_TH

    def _places(self, rows: Seq[Row], step: GroupStep) -> Tensor:
        """Of the tokens of its own rows among all of the launch."""
        starts = np.cumsum([0, *(row.num_tokens for row in rows)])
        spans = [np.arange(starts[each.number], starts[each.number + 1]) for each in step.own]
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *spans]))

    def _told(self, rows: Seq[Row], step: GroupStep, spans: list[tuple[int, int, int]]) -> Tensor:
        """Where the tokens that it tells of lie among its own."""
        return torch.searchsorted(self._places(rows, step), _ends(spans))

    def tell(self, drawn: list[int]) -> list[int]:
        """In all groups, what the first one has drawn. All give as many numbers."""
        if not drawn:
            return drawn
        told: list[int] = self.exchange.gather(torch.tensor(drawn, dtype=torch.int64))[0].tolist()
        return told


def _num_asked(row: Row) -> int:
    """Tokens at a row's end whose hidden states are wanted where tokens are drawn."""
    if row.sequence.wants_extras:
        return row.num_tokens
    return 1 if row.samples else 0


def _ends(spans: list[tuple[int, int, int]]) -> Tensor:
    """Of each (first token, tokens, count) the last `count` tokens."""
    places = [np.arange(first + length - count, first + length) for first, length, count in spans]
    return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *places]))
