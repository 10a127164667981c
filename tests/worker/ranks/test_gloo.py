"""Groups over Gloo: members are threads, but for one that dies."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.worker.protocol import Peers
from eventlm.worker.ranks.gloo import GlooExchange, GlooReceiver, GlooSender, GlooStore
from eventlm.worker.ranks.hand_over import HandedOver
from eventlm.worker.runner import PeerLostError


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for each member."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def exchanges(peers: Peers, size: int) -> list[GlooExchange]:
    return in_threads(size, lambda number: GlooExchange(GlooStore(peers, number, size).group("a", number, size), 64))


def links(peers: Peers, num_slots: int) -> tuple[GlooSender, GlooReceiver]:
    """From the second stage to the third."""
    first, second = in_threads(2, lambda number: GlooStore(peers, number, 2).group("b", number, 2))
    return GlooSender(first, num_slots), GlooReceiver(second, 7, torch.bfloat16, stage=1)


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.fixture(params=["folder", "address"])
def peers(request: pytest.FixtureRequest, tmp_path: Path) -> Peers:
    if request.param == "folder":
        return Peers(shared_memory=str(tmp_path))
    return Peers(address=f"127.0.0.1:{free_port()}", host="127.0.0.1")


def test_bytes_of_all_are_gathered(peers: Peers) -> None:
    groups = exchanges(peers, 2)

    def carry(number: int) -> list[list[int]]:
        everything = torch.zeros(2, 3, dtype=torch.uint8)
        groups[number].carry(torch.full((3,), 7 + number, dtype=torch.uint8), everything)
        return everything.tolist()

    assert in_threads(2, carry) == [[[7] * 3, [8] * 3]] * 2


def test_steps_are_handed_over_without_waiting(peers: Peers) -> None:
    sender, receiver = links(peers, 3)
    assert not receiver.wait(0)
    given = [HandedOver(step, ((step, 1), (2, 3)), torch.randn(step + 1, 7).bfloat16()) for step in range(30)]
    for each in given[:3]:
        sender.send(each)
    for each in given[3:]:
        sender.send(each)
        receiver.take()
    for each in given[-3:]:
        assert receiver.wait(30)
        found = receiver.take()
        assert found[:2] == each[:2]
        assert torch.equal(found.residual_TH, each.residual_TH)
    assert not receiver.wait(0.01)


def send_many(sender: GlooSender) -> None:
    for step in range(10):
        sender.send(HandedOver(step, ((0, 1),), torch.zeros(1, 7)))


def dying_member(peers: Peers, pipe: Connection) -> None:
    store = GlooStore(peers, 1, 2)
    exchange = GlooExchange(store.group("a", 1, 2), 64)
    store.group("b", 1, 2), store.group("c", 0, 2)
    exchange.gather(torch.zeros(1))
    pipe.send("ready")
    pipe.recv()


def test_the_end_of_a_peer_is_seen_at_once(tmp_path: Path) -> None:
    peers = Peers(shared_memory=str(tmp_path))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=dying_member, args=(peers, theirs), daemon=True)
    process.start()
    try:
        store = GlooStore(peers, 0, 2)
        exchange = GlooExchange(store.group("a", 0, 2), 64)
        sender = GlooSender(store.group("b", 0, 2), num_slots=1)
        receiver = GlooReceiver(store.group("c", 1, 2), 7, torch.float32, stage=0)
        exchange.gather(torch.zeros(1))
        assert ours.recv() == "ready"
        process.kill()
        process.join()
        with pytest.raises(PeerLostError, match=r"^a peer is gone: "):
            exchange.gather(torch.zeros(1))
        assert receiver.wait(30)
        for _ in range(2):
            with pytest.raises(PeerLostError, match=r"^a peer is gone: "):
                receiver.take()
        # The first ones may be on their way.
        with pytest.raises(PeerLostError):
            send_many(sender)
    finally:
        process.kill()
        process.join()
