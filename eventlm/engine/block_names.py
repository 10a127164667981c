"""Names of blocks: the hash of a block's tokens and all before them, mapped to an integer that the core may see.

The hash is 128 bits of BLAKE2b under a key that is random per run and never written, so a trace does not reveal whether
some text was in a prompt. A new hash gets a fresh integer, which is never used twice in a run: a pair that the bounded
table has lost costs a hit but never gives a wrong one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 16
#: The table keeps this many pairs for each block of the pool.
PAIRS_PER_BLOCK = 8


class Names(NamedTuple):
    """Integers of consecutive full blocks, and the hash of the last, from which the next block continues."""

    integers: list[int]
    last_hash: bytes


class BlockNames:
    """The table of one run. `capacity` is in pairs; the least recently named pair goes first.

    next_integer: above all that were ever given; 0 is the root of the core's tree.
    """

    def __init__(self, key: bytes, *, block_size: int, capacity: int, next_integer: int = 1) -> None:
        self.key = key
        self.next_integer = next_integer
        self._block_size = block_size
        self._capacity = capacity
        self._integers: dict[bytes, int] = {}

    def root(self, model: str, adapter: str, salt: str) -> bytes:
        """Hash that a first block continues: equal only for the same model, adapter and cache salt."""
        text = b"\0".join(part.encode() for part in (model, adapter, salt))
        return blake2b(text, digest_size=HASH_BYTES, key=self.key).digest()

    def extend(self, last_hash: bytes, token_ids: Sequence[int]) -> Names:
        """Names of the full blocks of `token_ids`, which continue a block boundary; what is left over is ignored."""
        hashes = self._hashes(last_hash, token_ids)
        return Names([self._integer(each) for each in hashes], hashes[-1] if hashes else last_hash)

    def learn(self, last_hash: bytes, token_ids: Sequence[int], integers: Sequence[int]) -> bytes:
        """Take over the names that these blocks had in the run before its engine died; returns the last hash."""
        hashes = self._hashes(last_hash, token_ids)
        for block_hash, integer in zip(hashes, integers, strict=True):
            self._integers.pop(block_hash, 0)
            self._keep(block_hash, integer)
            self.next_integer = max(self.next_integer, integer + 1)
        return hashes[-1] if hashes else last_hash

    def _hashes(self, last_hash: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """The hash of each full block, chained with the block before it."""
        size, hashes = self._block_size, []
        for start in range(0, len(token_ids) - size + 1, size):
            content = array("i", token_ids[start : start + size]).tobytes()
            last_hash = blake2b(last_hash + content, digest_size=HASH_BYTES, key=self.key).digest()
            hashes.append(last_hash)
        return hashes

    def _integer(self, block_hash: bytes) -> int:
        integer = self._integers.pop(block_hash, 0)
        if not integer:
            integer = self.next_integer
            self.next_integer += 1
        self._keep(block_hash, integer)
        return integer

    def _keep(self, block_hash: bytes, integer: int) -> None:
        """Dictionaries keep their order of insertion, so the first pair is the one named longest ago."""
        if len(self._integers) >= self._capacity:
            del self._integers[next(iter(self._integers))]
        self._integers[block_hash] = integer
