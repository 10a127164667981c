"""What a rank takes of its host's memory, and how much of the rest its KV cache gets where no size is given."""

from __future__ import annotations

from msgspec import Struct

#: The cache gets this share of what weights and activations leave free, for all replicas together, and of each replica
#: at most so much. The rotary tables of the context come out of it.
AUTO_DIVISOR = 4
MAX_AUTO_BYTES = 4 << 30


class RankMemory(Struct, frozen=True, kw_only=True):
    """Bytes of a rank's weights, of the activations of its largest step with what it exchanges, of its rotary tables
    for one position, of a KV block, of all state slots, and the most that its cache gets where no size is given.

    min_context: tokens of a context that must find room. most_blocks: that an engine can have.
    """

    weights: int
    activations: int
    position: int
    block: int
    states: int
    most_cache: int
    min_context: int
    most_blocks: int

    def num_blocks(self, free: int, *, block_size: int, longest: int) -> int:
        """KV blocks for a rank that may count on so many bytes; 0: none fits. longest: context in tokens."""
        left = max(free - self.weights - self.activations, 0)
        num_bytes = min(left // AUTO_DIVISOR, self.most_cache) - self.states
        found = blocks_beside_tables(num_bytes, self.block, self.position, block_size=block_size, longest=longest)
        return max(min(found, self.most_blocks), 0)


def blocks_beside_tables(num_bytes: int, block: int, position: int, *, block_size: int, longest: int) -> int:
    """KV blocks of `block` bytes that so many bytes hold beside rotary tables of `position` bytes for each token.

    longest: context in tokens that the tables may have.
    """
    # The tables are of all positions in the blocks, or of the longest context if that is shorter.
    return max(num_bytes // (block + block_size * position), (num_bytes - longest * position) // block)
