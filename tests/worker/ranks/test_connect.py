"""What carries the exchange of a rank, and who is before and after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eventlm.core.shards import Layout
from eventlm.errors import UsageError
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.config import read_model
from eventlm.models.spec import ModelSpec
from eventlm.worker.protocol import Peers, WorkerSetup
from eventlm.worker.ranks.connect import Connections
from eventlm.worker.ranks.gloo import GlooExchange
from eventlm.worker.ranks.shared_memory import SharedMemoryExchange
from tests.checkpoints import make_checkpoint
from tests.worker.ranks.test_gloo import free_port, in_threads


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    folder = tmp_path / "model"
    folder.mkdir()
    return read_model(make_checkpoint(folder))


def connections(rank: int, layout: Layout, peers: Peers) -> Connections:
    return Connections(
        WorkerSetup(
            replica=0,
            epoch=1,
            model="",
            block_size=4,
            num_blocks=8,
            max_model_len=32,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            layout=layout,
            rank=rank,
            peers=peers,
        )
    )


def test_a_model_in_one_piece_needs_nobody() -> None:
    alone = connections(0, Layout(), Peers())
    assert alone.exchange(64, 0) is None
    stage = alone.stage(64, torch.float32)
    assert stage.is_first
    assert stage.is_last


@pytest.mark.parametrize("kind", ["shared", "loopback", "hosts"])
def test_tensor_ranks_of_a_stage_meet_and_stages_follow_each_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "loopback":
        monkeypatch.setattr("eventlm.worker.ranks.connect.available_builds", list)
    elif kind == "shared" and not available_builds():
        pytest.skip("no build of the forward pass is compiled")
    by_address = Peers(address=f"127.0.0.1:{free_port()}", host="127.0.0.1")
    peers = by_address if kind == "hosts" else Peers(shared_memory=str(tmp_path))
    layout = Layout(2, 3)
    carrier = SharedMemoryExchange if kind == "shared" else GlooExchange
    assert_connected(layout, [peers] * 6, [carrier] * 6)


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize("num_first", [4, 3], ids=["groups within a host", "a group on two hosts"])
def test_ranks_of_one_host_meet_in_memory_and_others_over_gloo(num_first: int, tmp_path: Path) -> None:
    """The first rank, which has the store, needs Gloo for the others only."""
    layout, address = Layout(2, 3), f"127.0.0.1:{free_port()}"
    peers: list[Peers] = []
    for name, ranks in (("a", range(num_first)), ("b", range(num_first, 6))):
        (tmp_path / name).mkdir()
        here = Peers(shared_memory=str(tmp_path / name), address=address, host="127.0.0.1", neighbours=list(ranks))
        peers += [here] * len(ranks)
    middle = SharedMemoryExchange if num_first == 4 else GlooExchange
    assert_connected(layout, peers, [SharedMemoryExchange] * 2 + [middle] * 2 + [SharedMemoryExchange] * 2)


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
def test_a_meeting_can_be_bounded_and_its_ranks_can_meet_in_another_way(tmp_path: Path) -> None:
    def connect(rank: int) -> tuple[int, bytes]:
        found = connections(rank, Layout(2), Peers(shared_memory=str(tmp_path)))
        exchange = found.exchange(64, 0, at_once=128)
        assert exchange is not None
        if rank == 0:
            found.store().set("word", "given")
        # More than a meeting takes.
        assert exchange.gather(torch.full((100,), rank)).tolist() == [[0] * 100, [1] * 100]
        return exchange.group.slot_bytes, found.store().get("word")

    assert in_threads(2, connect) == [(128, b"given")] * 2


def assert_connected(
    layout: Layout, peers: Sequence[Peers], carriers: Sequence[type[GlooExchange | SharedMemoryExchange]]
) -> None:
    """Tensor ranks meet, by what carries each, and a step goes through all stages."""
    # None leaves before all are done.
    kept: list[object] = []

    def connect(rank: int) -> tuple[list[float], list[float]]:
        """Whom it meets, and the ranks through which a step has come here."""
        found = connections(rank, layout, peers[rank])
        exchange = found.exchange(64, 100)
        assert isinstance(exchange, carriers[rank])
        assert exchange.group.slot_bytes >= 16 * 64 * 4
        met = exchange.gather(torch.tensor(float(rank))).tolist()
        stage = found.stage(4, torch.float32)
        kept.extend((found, exchange, stage))
        while not stage.has_input():
            pass
        given = stage.begin(5, 1)
        path_TH = torch.zeros(1, 4) if given.residual_TH is None else given.residual_TH
        path_TH[0, layout.place_of(rank).stage] = rank + 1
        if not stage.is_last:
            stage.end(5, given, path_TH)
        return met, path_TH[0].tolist()

    found = in_threads(6, connect)
    assert [met for met, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [path for _, path in found[4:]] == [[1, 3, 5, 0], [2, 4, 6, 0]]


def test_ranks_of_one_place_meet_over_all_kv_groups(tmp_path: Path, model: ModelSpec) -> None:
    layout, peers = Layout(2, 1, 3), Peers(shared_memory=str(tmp_path))
    assert connections(0, Layout(2), peers).kv_group(model) is None

    def connect(rank: int) -> tuple[int, list[float]]:
        group = connections(rank, layout, peers).kv_group(model)
        assert group is not None
        kept.append(group)
        return group.number, group.exchange.gather(torch.tensor(float(rank))).tolist()

    kept: list[object] = []
    assert in_threads(6, connect) == [(rank // 2, [rank % 2, rank % 2 + 2, rank % 2 + 4]) for rank in range(6)]


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)])
def test_memory_without_room_for_a_step_is_refused(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available_builds():
        pytest.skip("no build of the forward pass is compiled")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    place = layout.answering_rank
    found = connections(place, layout, Peers(shared_memory=str(tmp_path / "own")))
    (tmp_path / "own").mkdir()

    def connect() -> None:
        found.exchange(64, 100)
        found.stage(64, torch.float32)

    with pytest.raises(UsageError, match=f"{tmp_path} has no room for what ranks exchange in a step of 16 tokens"):
        connect()
