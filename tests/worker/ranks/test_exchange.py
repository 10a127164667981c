"""What all exchanges do, whatever carries them. Members are threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from eventlm.worker.protocol import Peers
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.ranks.gloo import GlooExchange, GlooStore
from tests.worker.ranks.test_gloo import in_threads


def make_exchange(kind: str, folder: Path, number: int, size: int) -> RankExchange:
    assert kind == "gloo"
    return GlooExchange(GlooStore(Peers(shared_memory=str(folder)), number, size).group("a", number, size))


@pytest.mark.parametrize("kind", ["gloo"])
def test_all_gather_in_the_order_of_the_ranks(kind: str, tmp_path: Path) -> None:
    groups = in_threads(3, lambda number: make_exchange(kind, tmp_path, number, 3))
    assert [(group.size, group.rank) for group in groups] == [(3, 0), (3, 1), (3, 2)]
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        for shape in ((), (5,), (3, 0), (4, 33)):
            brought = torch.randint(0, 100, (3, *shape), generator=generator).to(dtype)
            # Not contiguous, where that is possible.
            mine = [each.t().contiguous().t() if each.dim() == 2 else each for each in brought]
            gathers = [partial(group.gather, each) for group, each in zip(groups, mine, strict=True)]
            for found in in_threads(3, lambda number, gathers=gathers: gathers[number]()):  # type: ignore[misc]
                assert torch.equal(found, brought)
                assert found.dtype == dtype
