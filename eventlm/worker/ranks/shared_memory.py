"""Exchange between ranks of one host over memory that they share, in compiled code."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

from torch import Tensor

from eventlm.kernels.cpu.meeting import Meeting, create_segment
from eventlm.kernels.cpu.native import MeetingEndedError
from eventlm.worker.runner import PeerLostError

#: How often one looks for what the first rank makes at its start.
_POLL_S = 0.01


class SharedMemoryExchange:
    """A `RankExchange` of ranks that have a folder in common, where they meet under this name.

    slot_bytes: what one meeting of compiled code exchanges at most. spin_us: how long a rank that waits keeps looking
    before it sleeps. Waits for the first rank. Raises OSError if there is no room.
    """

    def __init__(self, folder: Path, name: str, *, size: int, rank: int, slot_bytes: int, spin_us: int) -> None:
        self.size, self.rank = size, rank
        path = folder / name
        if rank == 0:
            # The others look for the last name, under which it is whole.
            fresh = folder / f"{name}.fresh"
            create_segment(fresh, size=size, slot_bytes=slot_bytes)
            fresh.rename(path)
        while not path.exists():
            time.sleep(_POLL_S)
        self.group = Meeting(path, size=size, number=rank, slot_bytes=slot_bytes, spin_us=spin_us)
        # The others would wait for a process that ends by itself until someone ends them.
        atexit.register(self.group.leave)

    @property
    def is_waiting(self) -> bool:
        """As `RankExchange` says."""
        return self.group.is_waiting

    def gather(self, mine: Tensor) -> Tensor:
        """As `RankExchange` says."""
        try:
            return self.group.gather(mine)
        except MeetingEndedError as error:
            raise PeerLostError(str(error)) from error

    def close(self) -> None:
        """Leave the others, who then lose a peer. Nothing may be called afterwards."""
        atexit.unregister(self.group.leave)
        self.group.close()
