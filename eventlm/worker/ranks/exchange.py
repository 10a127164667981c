"""How the ranks of a group see each other. Who adds up what they gather does it in the order of the ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankExchange(Protocol):
    """A group of `size` ranks, of which this one is number `rank`. All take part in all that it does, in one order."""

    size: int
    rank: int

    def gather(self, mine: Tensor) -> Tensor:
        """[size, ...] in the order of the ranks, from each of them one like `mine`.

        Valid until the next call. Raises PeerLostError once a rank is gone.
        """
        ...
