"""How many KV blocks fit beside a model."""

from __future__ import annotations

import pytest

from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.gpu.memory import Measured, num_blocks_beside

GIB = 1 << 30
BLOCK = 1 << 20


def blocks(*, share_ppm: int = 900_000, needed: int = 2, **changes: int) -> int:
    figures = {"total": 80 * GIB, "free": 60 * GIB, "taken": 20 * GIB, "activations": 2 * GIB, "graphs": GIB}
    measured = Measured(**{**figures, **changes})
    return num_blocks_beside(measured, share_ppm=share_ppm, block_bytes=BLOCK, num_blocks_needed=needed)


def test_the_cache_gets_what_the_model_and_its_largest_step_leave_of_the_share() -> None:
    assert blocks() == (72 - 20 - 2 - 1) * 1024
    assert blocks(share_ppm=500_000) == (40 - 20 - 2 - 1) * 1024


def test_the_cache_gets_no_more_than_is_free() -> None:
    assert blocks(free=10 * GIB) == (10 - 2 - 1) * 1024


def test_a_model_that_does_not_fit_is_told_so_with_the_figures() -> None:
    with pytest.raises(CacheMemoryError) as caught:
        blocks(taken=71 * GIB, free=9 * GIB, needed=5)
    message = str(caught.value)
    for figure in ("81,920 MiB", "73,728 MiB", "72,704 MiB", "2,048 MiB", "1,024 MiB", "5 MiB", "--max-model-len"):
        assert figure in message
    assert "other programs" not in message


def test_what_others_take_is_named() -> None:
    with pytest.raises(CacheMemoryError, match="30,720 MiB are taken by other programs"):
        blocks(taken=49 * GIB, free=GIB, needed=5)
