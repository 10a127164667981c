"""Exchange over torch.distributed's Gloo: between hosts, and where nothing is compiled that shares memory.

Each group has sockets of its own, so that a rank is in several groups without the others of the replica. A rank whose
peer is gone gets PeerLostError as soon as the connection is closed. A peer that hangs is waited for: the engine, which
hears from all of them, ends the whole group.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from functools import cached_property
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore, Work
from torch.distributed import ProcessGroupGloo

from eventlm.kernels.cpu.meeting import CarriedMeeting
from eventlm.worker.protocol import Peers
from eventlm.worker.ranks.hand_over import HandedOver, header_bytes, pack_header, unpack_header
from eventlm.worker.runner import PeerLostError

#: A bound on all waits, far beyond the time after which the engine gives a silent rank up.
PATIENCE = datetime.timedelta(hours=1)
_LOOPBACK = "127.0.0.1"
#: A ProcessGroupGloo. Its type, as torch describes it, lacks most of what it has.
_Group = Any


class GlooStore:
    """Where the ranks of a replica find each other's addresses: a file in their folder, or the store at an address.

    rank: this one's number of `num_ranks`. Raises PeerLostError if the first rank, which has the store, cannot be
    reached.
    """

    def __init__(self, peers: Peers, rank: int, num_ranks: int) -> None:
        self._host = peers.host or _LOOPBACK
        self._store: Store
        if not peers.address:
            self._store = FileStore(str(Path(peers.shared_memory) / "gloo"), num_ranks)
            return
        host, _, port = peers.address.rpartition(":")
        try:
            self._store = TCPStore(
                host.strip("[]"), int(port), is_master=rank == 0, wait_for_workers=False, timeout=PATIENCE
            )
        except RuntimeError as error:
            raise PeerLostError(f"the store of the first rank at {peers.address}: {_first_line(error)}") from error

    def part(self, name: str) -> Store:
        """What the group `name` uses of it, and no other."""
        return PrefixStore(name, self._store)

    def group(self, name: str, number: int, size: int) -> _Group:
        """The group `name` of `size` ranks, of which this is the given one, once all are there."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = PATIENCE
        try:
            return gloo(self.part(name), number, size, options)
        except RuntimeError as error:
            raise PeerLostError(f"no connection with the peers of {name}: {_first_line(error)}") from error


class GlooExchange:
    """A `RankExchange` of the ranks of a group. slot_bytes: what compiled code exchanges at once, at most."""

    def __init__(self, group: _Group, slot_bytes: int) -> None:
        self.size, self.rank = group.size(), group.rank()
        self.is_waiting = False
        self._group = group
        self._slot_bytes = slot_bytes

    @cached_property
    def group(self) -> CarriedMeeting:
        """As `RankExchange` says."""
        return CarriedMeeting(self.carry, size=self.size, number=self.rank, slot_bytes=self._slot_bytes)

    def gather(self, mine: Tensor) -> Tensor:
        """As `RankExchange` says."""
        everything = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        if mine.numel():
            # As bytes: Gloo does not know all dtypes.
            sent = mine.contiguous().view(-1).view(torch.uint8)
            self.carry(sent, everything.view(self.size, -1).view(torch.uint8))
        return everything

    def carry(self, mine: Tensor, everything: Tensor) -> None:
        """Fill `everything`, uint8 [size, n], with what all have as `mine`, uint8 [n], in the order of their ranks."""
        self.is_waiting = True
        try:
            self._group._allgather_base(everything.view(-1), mine).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        self.is_waiting = False


class GlooSender:
    """A `HandOverSender` to the second member of a group of two."""

    def __init__(self, group: _Group, num_slots: int) -> None:
        self._group = group
        self._num_slots = num_slots
        #: What is sent, with the memory that it is sent from, oldest first.
        self._sends: deque[tuple[Work, Tensor]] = deque()

    def send(self, handed: HandedOver) -> None:
        """As `HandOverSender` says."""
        residual_TH = handed.residual_TH.contiguous()
        header = torch.frombuffer(bytearray(pack_header(handed)), dtype=torch.uint8)
        try:
            for tensor in (header, residual_TH.view(-1).view(torch.uint8)):
                self._sends.append((self._group.send([tensor], 1, 0), tensor))
            while len(self._sends) > 2 * self._num_slots:
                # Of a step that has been answered, so it does not wait.
                self._sends.popleft()[0].wait()
        except RuntimeError as error:
            raise _lost(error) from error


class GlooReceiver:
    """A `HandOverReceiver` from the first member of a group of two; a thread receives.

    stage: of the sender.
    """

    def __init__(self, group: _Group, hidden_size: int, dtype: torch.dtype, *, stage: int) -> None:
        self._group = group
        self._hidden_size, self._dtype = hidden_size, dtype
        self._header = torch.empty(header_bytes(stage + 1), dtype=torch.uint8)
        self._received: Queue[HandedOver | PeerLostError] = Queue()
        self._next: HandedOver | PeerLostError | None = None
        threading.Thread(target=self._receive_all, name="hand-over", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """As `HandOverReceiver` says."""
        if self._next is None:
            try:
                self._next = self._received.get(timeout=timeout_s)
            except Empty:
                return False
        return True

    def take(self) -> HandedOver:
        """As `HandOverReceiver` says."""
        handed = self._received.get() if self._next is None else self._next
        self._next = None
        if isinstance(handed, PeerLostError):
            # For all who ask later, too.
            self._next = handed
            raise handed
        return handed

    def _receive_all(self) -> None:
        """Runs in a thread of its own."""
        try:
            while True:
                self._received.put(self._receive())
        except RuntimeError as error:
            self._received.put(_lost(error))

    def _receive(self) -> HandedOver:
        self._group.recv([self._header], 0, 0).wait()
        step, times_ns, num_tokens = unpack_header(self._header.numpy().tobytes())
        residual_TH = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype)
        self._group.recv([residual_TH.view(-1).view(torch.uint8)], 0, 0).wait()
        return HandedOver(step, times_ns, residual_TH)


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"a peer is gone: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """What it says, without the place in torch's sources that Gloo puts before it."""
    line = str(error).split("\n", 1)[0]
    return line.rsplit("] ", 1)[-1] if line.startswith("[/") else line
