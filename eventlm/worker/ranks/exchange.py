"""How the ranks of a group see each other. Who adds up what they gather does it in the order of the ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eventlm.kernels.cpu.meeting import PeerGroup


class RankExchange(Protocol):
    """A group of `size` ranks, of which this one is number `rank`. All take part in all that it does, in one order."""

    size: int
    rank: int

    @property
    def group(self) -> PeerGroup:
        """The same ranks as compiled code takes part in them."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for another. To be read in any thread."""
        ...

    def gather(self, mine: Tensor) -> Tensor:
        """[size, ...] in the order of the ranks, from each of them one like `mine`.

        Valid until the next call. Raises PeerLostError once a rank is gone.
        """
        ...
