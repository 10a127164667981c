"""Which replicas of a set have a prompt's blocks, by the blocks' names: what a router asks instead of each replica.

The replicas of a name are the bits of an integer, the first replica of the set is bit 0: an `and` of two such integers
tells which of a thousand replicas have both blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class PrefixGroup(NamedTuple):
    """The replicas, as bits, that have exactly so many leading blocks of a prompt."""

    replicas: int
    num_blocks: int


class PrefixIndex:
    """held: replicas whose cache holds the block. awaited: those where something with this block waits or is half done.

    Names of a sequence stand for its whole text up to there, so a replica that has a block has those before it.
    """

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.awaited: dict[int, int] = {}

    def holders(self, name: int) -> int:
        """The replicas that hold or await a block, as bits."""
        return self.held.get(name, 0) | self.awaited.get(name, 0)

    def groups(self, names: list[int], num_blocks: int) -> list[PrefixGroup]:
        """The replicas that have any of the first `num_blocks` blocks, by how many; the longest prefix last."""
        found: list[PrefixGroup] = []
        replicas = self.holders(names[0]) if num_blocks else 0
        for index in range(1, num_blocks):
            if not replicas:
                return found
            further = replicas & self.holders(names[index])
            if further != replicas:
                found.append(PrefixGroup(replicas & ~further, index))
            replicas = further
        if replicas:
            found.append(PrefixGroup(replicas, num_blocks))
        return found


class Holder:
    """One replica in one of the two tables of a `PrefixIndex`."""

    __slots__ = ("_bit", "_table")

    def __init__(self, table: dict[int, int], position: int) -> None:
        self._table = table
        self._bit = 1 << position

    def add(self, names: Iterable[int]) -> None:
        """The replica has these blocks now."""
        table, bit = self._table, self._bit
        for name in names:
            table[name] = table.get(name, 0) | bit

    def drop(self, names: Iterable[int]) -> None:
        """It has these blocks no more."""
        table, bit = self._table, self._bit
        for name in names:
            left = table[name] & ~bit
            if left:
                table[name] = left
            else:
                del table[name]


def bits_of(replicas: int) -> Iterator[int]:
    """The positions of the replicas in their set, in order."""
    while replicas:
        lowest = replicas & -replicas
        yield lowest.bit_length() - 1
        replicas ^= lowest
