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
    """The table of one run. `capacity` is in pairs; the least recently named pair goes first."""

    def __init__(self, key: bytes, *, block_size: int, capacity: int) -> None:
        self._key = key
        self._block_size = block_size
        self._capacity = capacity
        self._integers: dict[bytes, int] = {}
        #: 0 is the root of the core's tree.
        self._next = 1

    def root(self, model: str, adapter: str, salt: str) -> bytes:
        """Hash that a first block continues: equal only for the same model, adapter and cache salt."""
        text = b"\0".join(part.encode() for part in (model, adapter, salt))
        return blake2b(text, digest_size=HASH_BYTES, key=self._key).digest()

    def extend(self, last_hash: bytes, token_ids: Sequence[int]) -> Names:
        """Names of the full blocks of `token_ids`, which continue a block boundary; what is left over is ignored."""
        size = self._block_size
        integers = []
        for start in range(0, len(token_ids) - size + 1, size):
            content = array("i", token_ids[start : start + size]).tobytes()
            last_hash = blake2b(last_hash + content, digest_size=HASH_BYTES, key=self._key).digest()
            integers.append(self._integer(last_hash))
        return Names(integers, last_hash)

    def _integer(self, block_hash: bytes) -> int:
        integer = self._integers.pop(block_hash, 0)
        if not integer:
            integer = self._next
            self._next += 1
            if len(self._integers) >= self._capacity:
                del self._integers[next(iter(self._integers))]
        # Dictionaries keep their order of insertion, so the first pair is the one named longest ago.
        self._integers[block_hash] = integer
        return integer
