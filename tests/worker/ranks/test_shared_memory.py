"""Ranks that share memory: how they find each other, and lose each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eventlm.kernels.cpu.native import available_builds
from eventlm.worker.ranks.shared_memory import SharedMemoryExchange
from eventlm.worker.runner import PeerLostError
from tests.worker.ranks.test_gloo import in_threads

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")


def test_one_that_has_left_is_lost_to_those_that_wait(tmp_path: Path) -> None:
    def wait_for_the_last(number: int) -> str:
        exchange = SharedMemoryExchange(tmp_path, "a", size=3, rank=number, slot_bytes=64, spin_us=50)
        exchange.gather(torch.zeros(1))
        if number == 2:
            exchange.close()
            return "left"
        with pytest.raises(PeerLostError) as caught:
            exchange.gather(torch.zeros(1))
        return str(caught.value)

    assert in_threads(3, wait_for_the_last) == ["a peer has left or failed"] * 2 + ["left"]
