"""What carries the sums of ranks on GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from eventlm.core.shards import Layout
from eventlm.worker.gpu import rank_exchange
from eventlm.worker.gpu.device import open_device
from eventlm.worker.gpu.rank_exchange import GpuExchange, HostExchange, NcclExchange, gpu_exchange
from eventlm.worker.protocol import Peers, WorkerSetup
from eventlm.worker.ranks.connect import Connections
from eventlm.worker.ranks.gloo import GlooStore
from eventlm.worker.runner import PeerLostError
from tests.worker.ranks.test_gloo import in_threads


def connect(folder: Path, rank: int, device: torch.device, size: int = 2) -> GpuExchange | None:
    setup = WorkerSetup(
        replica=0,
        epoch=1,
        model="none",
        block_size=16,
        num_blocks=8,
        max_model_len=64,
        max_num_batched_tokens=4,
        max_num_seqs=2,
        layout=Layout(size),
        rank=rank,
        peers=Peers(shared_memory=str(folder)),
    )
    return gpu_exchange(Connections(setup), 8, 5, device)


def test_ranks_that_share_a_gpu_meet_over_the_host(tmp_path: Path) -> None:
    """As those that are computed by Triton's interpreter do."""
    device = open_device("cuda:0")
    exchanges = in_threads(2, lambda rank: connect(tmp_path, rank, device))
    assert [type(each) for each in exchanges] == [HostExchange] * 2
    brought = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    for found in in_threads(2, lambda rank: exchanges[rank].gather(brought[rank]).clone()):
        assert torch.equal(found, brought)
        assert found.device == brought.device
    assert not any(each.is_waiting for each in exchanges)


def test_ranks_with_a_gpu_each_meet_over_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def make(store: Any, *, size: int, rank: int, device: torch.device) -> Any:
        made.append((size, rank))

    def properties(device: torch.device) -> Any:
        return SimpleNamespace(uuid=f"GPU-{device.index}")

    monkeypatch.setattr(rank_exchange, "NcclExchange", make)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    in_threads(2, lambda rank: connect(tmp_path, rank, torch.device("cuda", rank)))
    assert sorted(made) == [(2, 0), (2, 1)]


def test_one_rank_has_nobody_to_meet(tmp_path: Path) -> None:
    assert connect(tmp_path, 0, torch.device("cpu"), size=1) is None


#: As torch words what NCCL reports.
FAILED = (
    "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclSystemError: System call or external library call failed or device error. \n"
    "Last error:\nsocketPollConnect: Connection refused\nException raised from gather at ProcessGroupNCCL.cpp:3690:\n#0"
)
WHY = (
    "ncclSystemError: System call or external library call failed or device error. "
    "Last error: socketPollConnect: Connection refused"
)


def fail_with(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(torch.distributed, name, fail)


def nccl_exchange(monkeypatch: pytest.MonkeyPatch) -> NcclExchange:
    monkeypatch.setattr(rank_exchange.atexit, "register", lambda function: None)
    return NcclExchange(Store(), size=2, rank=0, device=torch.device("cuda:0"))


@pytest.mark.parametrize(("said", "why"), [(FAILED, WHY), ("connection was closed", "connection was closed")])
def test_what_nccl_reports_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, said: str, why: str) -> None:
    fail_with(monkeypatch, "init_process_group", torch.distributed.DistBackendError(said))
    with pytest.raises(PeerLostError) as refused:
        nccl_exchange(monkeypatch)
    assert str(refused.value) == f"NCCL finds no way to the peers: {why}"


def test_a_peer_that_nccl_has_lost_is_no_failure_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *arguments, **options: None)
    exchange = nccl_exchange(monkeypatch)
    fail_with(monkeypatch, "all_gather_into_tensor", torch.distributed.DistBackendError(FAILED))
    with pytest.raises(PeerLostError) as lost:
        exchange.gather(torch.ones(3))
    assert str(lost.value) == f"NCCL has lost a peer: {WHY}"
    # What is no matter between ranks is this one's own.
    fail_with(monkeypatch, "all_gather_into_tensor", RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        exchange.gather(torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_nccl_gives_back_what_the_only_rank_gives(tmp_path: Path) -> None:
    device = open_device("cuda:0")
    store = GlooStore(Peers(shared_memory=str(tmp_path)), 0, 1).part("a")
    exchange = NcclExchange(store, size=1, rank=0, device=device)
    for mine in (torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor([7]), torch.empty(0, 4)):
        found = exchange.gather(mine.to(device))
        assert torch.equal(found.cpu(), mine[None])
