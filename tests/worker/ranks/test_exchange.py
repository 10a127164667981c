"""What all exchanges do, whatever carries them. Members are threads."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from eventlm.kernels.cpu.native import available_builds
from eventlm.worker.protocol import Peers
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.ranks.gloo import GlooExchange, GlooStore
from eventlm.worker.ranks.shared_memory import SharedMemoryExchange
from tests.worker.ranks.test_gloo import in_threads

KINDS = ["gloo", *(["shared"] if available_builds() else [])]
SLOT_BYTES = 256


def make_exchange(kind: str, folder: Path, number: int, size: int) -> RankExchange:
    if kind == "shared":
        return SharedMemoryExchange(folder, "a", size=size, rank=number, slot_bytes=SLOT_BYTES, spin_us=50)
    store = GlooStore(Peers(shared_memory=str(folder)), number, size)
    return GlooExchange(store.group("a", number, size), SLOT_BYTES)


def make_exchanges(kind: str, folder: Path, size: int) -> list[RankExchange]:
    return in_threads(size, lambda number: make_exchange(kind, folder, number, size))


@pytest.mark.parametrize("kind", KINDS)
def test_all_gather_in_the_order_of_the_ranks(kind: str, tmp_path: Path) -> None:
    exchanges = make_exchanges(kind, tmp_path, 3)
    assert [(each.size, each.rank) for each in exchanges] == [(3, 0), (3, 1), (3, 2)]
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        # In a slot, in several, nothing, and not contiguous.
        for shape in ((), (5,), (3, 0), (4, 33)):
            brought = torch.randint(0, 100, (3, *shape), generator=generator).to(dtype)
            mine = [each.t().contiguous().t() if each.dim() == 2 else each for each in brought]
            gathers = [partial(exchange.gather, each) for exchange, each in zip(exchanges, mine, strict=True)]
            for found in in_threads(3, lambda number, gathers=gathers: gathers[number]()):  # type: ignore[misc]
                assert torch.equal(found, brought)
                assert found.dtype == dtype


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_meets_in_the_same_order(kind: str, tmp_path: Path) -> None:
    exchanges = make_exchanges(kind, tmp_path, 2)

    def take_turns(number: int) -> list[list[int]]:
        exchange = exchanges[number]
        gathers = [exchange.gather, exchange.group.gather] * 3
        return [gather(torch.tensor(10 * place + number)).tolist() for place, gather in enumerate(gathers)]

    assert in_threads(2, take_turns) == [[[10 * place, 10 * place + 1] for place in range(6)]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_waits_says_so(kind: str, tmp_path: Path) -> None:
    exchanges = make_exchanges(kind, tmp_path, 2)
    thread = threading.Thread(target=exchanges[1].gather, args=(torch.zeros(1),))
    thread.start()
    while not exchanges[1].is_waiting:
        time.sleep(0.001)
    assert not exchanges[0].is_waiting
    exchanges[0].gather(torch.zeros(1))
    thread.join()
    assert not any(each.is_waiting for each in exchanges)
