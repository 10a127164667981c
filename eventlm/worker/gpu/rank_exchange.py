"""How tensor ranks on GPUs see each other: over NCCL where each has a GPU of its own, else by way of the host."""

from __future__ import annotations

import atexit
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import Store

from eventlm.worker.ranks.connect import Connections
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.ranks.gloo import PATIENCE
from eventlm.worker.runner import PeerLostError

#: What goes over the host at once. More would take more of the memory that processes share.
_AT_ONCE = 8 << 20


class GpuExchange(Protocol):
    """As `RankExchange`, of tensors on GPUs."""

    size: int
    rank: int

    @property
    def is_waiting(self) -> bool:
        """As `RankExchange` says, as far as a host can see it."""
        ...

    def gather(self, mine: Tensor) -> Tensor:
        """As `RankExchange` says. The device may not have it yet."""
        ...


class HostExchange:
    """Ranks whose hosts have an exchange. What they gather waits for the device."""

    def __init__(self, hosts: RankExchange, device: torch.device) -> None:
        self.size, self.rank = hosts.size, hosts.rank
        self._hosts, self._device = hosts, device

    @property
    def is_waiting(self) -> bool:
        """As `GpuExchange` says."""
        return self._hosts.is_waiting

    def gather(self, mine: Tensor) -> Tensor:
        """As `GpuExchange` says."""
        return self._hosts.gather(mine.cpu()).to(self._device)


class NcclExchange:
    """Ranks that have a GPU each. A process can have one of these.

    store: that no others use. Returns once all are there.
    """

    #: It is the device that waits, and not every rank's host: which one the others wait for is not known.
    is_waiting = False

    def __init__(self, store: Store, *, size: int, rank: int, device: torch.device) -> None:
        self.size, self.rank = size, rank
        try:
            torch.distributed.init_process_group(
                "nccl", store=store, world_size=size, rank=rank, timeout=PATIENCE, device_id=device
            )
        except RuntimeError as error:
            raise PeerLostError(f"NCCL finds no way to the peers: {_reason(error)}") from error
        atexit.register(torch.distributed.destroy_process_group)

    def gather(self, mine: Tensor) -> Tensor:
        """As `GpuExchange` says."""
        everything, mine = mine.new_empty((self.size, *mine.shape)), mine.contiguous()
        if mine.numel():
            try:
                torch.distributed.all_gather_into_tensor(everything, mine)
            except torch.distributed.DistError as error:
                raise PeerLostError(f"NCCL has lost a peer: {_reason(error)}") from error
        return everything


def _reason(error: RuntimeError) -> str:
    """What NCCL says in one line. Its first line is where in torch's sources it failed, its last one why."""
    said, _, _ = str(error).partition("Exception raised from")
    where, *why = said.splitlines() or [type(error).__name__]
    return " ".join(" ".join(why).split()) or where


def gpu_exchange(
    connections: Connections, hidden_size: int, most_vocab_rows: int, device: torch.device
) -> GpuExchange | None:
    """With the other tensor ranks of a stage, see `Connections.exchange`; None if there are none."""
    hosts = connections.exchange(hidden_size, most_vocab_rows, at_once=_AT_ONCE)
    if hosts is None:
        return None
    if device.type == "cuda" and _have_one_each(hosts, device):
        return NcclExchange(connections.store(), size=hosts.size, rank=hosts.rank, device=device)
    return HostExchange(hosts, device)


def _have_one_each(hosts: RankExchange, device: torch.device) -> bool:
    """NCCL does not let two ranks have the same GPU."""
    name = str(torch.cuda.get_device_properties(device).uuid)
    names = hosts.gather(torch.frombuffer(bytearray(name, "ascii"), dtype=torch.uint8))
    return len({bytes(each.tolist()) for each in names}) == hosts.size
