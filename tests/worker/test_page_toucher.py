"""Memory is there before the blocks that lie in it are used."""

from __future__ import annotations

import itertools
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.worker.page_toucher import PageToucher
from tests.processes import PATIENCE_SECONDS, wait_until

#: Blocks of 256 KiB in each of six parts: eight are touched at once.
SHAPE = (3, 2, 100, 4, 16, 2048)
BLOCK_BYTES = 4 * 16 * 2048 * 2


def resident(kv: Tensor) -> np.ndarray:
    """Whether each block of each part has its memory, bool [parts, blocks]."""
    words = np.fromfile(
        "/proc/self/pagemap",
        dtype=np.uint64,
        offset=kv.data_ptr() // mmap.PAGESIZE * 8,
        count=kv.nbytes // mmap.PAGESIZE,
    )
    pages = (words >> 63).astype(bool).reshape(kv.shape[0] * 2, kv.shape[2], -1)
    # The first and the last page may be a neighbour's too.
    return pages[:, :, 1:-1].all(axis=2)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not show its pages")
def test_blocks_that_come_next_have_their_memory() -> None:
    kv = host_memory.zeros(SHAPE, torch.bfloat16)
    assert kv[0, 0, 0].nbytes == BLOCK_BYTES
    assert resident(kv).mean() < 0.1
    toucher = PageToucher(list(kv))
    toucher.begin()
    toucher.wait()
    assert resident(kv)[:, :8].all()
    # Pages may be huge.
    assert not resident(kv)[:, 40:].all(axis=0).any()
    # A round under way is not disturbed; each step asks again.
    wait_until(lambda: (toucher.stay_ahead_of(60), resident(kv)[:, :76].all())[1])
    wait_until(lambda: (toucher.stay_ahead_of(100), resident(kv).all())[1])
    assert not kv.any()


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system does not show its pages")
def test_while_there_is_time_more_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.worker.page_toucher._BYTES_AHEAD", 40 * 6 * BLOCK_BYTES)
    kv = host_memory.zeros(SHAPE, torch.bfloat16)
    toucher = PageToucher(list(kv))
    toucher.begin()
    toucher.wait()
    num_times = 0
    while toucher.touch_some():
        num_times += 1
    assert resident(kv)[:, :40].all()
    assert not resident(kv)[:, 64:].all(axis=0).any()
    # Each time a part of a round, so that a step that comes need not wait for long.
    assert num_times >= 3 * 6
    toucher.stay_ahead_of(100)
    toucher.wait()
    assert not toucher.touch_some()
    assert resident(kv).all()
    assert not kv.any()


def test_no_page_is_touched_by_two_threads_and_neither_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toucher = PageToucher(list(host_memory.zeros(SHAPE, torch.bfloat16)))
    may_go, callers, returned = threading.Event(), [], []

    def madvise(*_: int) -> int:
        callers.append(threading.current_thread().name)
        assert may_go.wait(PATIENCE_SECONDS)
        returned.append(True)
        return 0

    monkeypatch.setattr(toucher, "_madvise", madvise)
    toucher.begin()
    wait_until(lambda: callers)
    assert all(toucher.touch_some() for _ in range(500))
    toucher.stay_ahead_of(90)
    assert (callers, returned) == (["page-toucher"], [])
    may_go.set()
    wait_until(lambda: not toucher.touch_some())
    # All that there is, each part once.
    assert len(callers) == 6 * 13


def test_steps_have_the_thread_beside_them_when_it_is_needed() -> None:
    toucher = PageToucher(list(host_memory.zeros(SHAPE, torch.bfloat16)))
    toucher.begin()
    toucher.wait()
    first = toucher._thread
    # A short request, and the tokens that it draws.
    for num_blocks in (2, 2, 3):
        toucher.stay_ahead_of(num_blocks)
    assert toucher._thread is first
    # One more would leave less than half a round.
    toucher.stay_ahead_of(4)
    toucher.wait()
    assert (toucher._num_touched, toucher._thread is first) == (24, False)
    second = toucher._thread
    toucher.stay_ahead_of(6)
    assert toucher._thread is second
    # Another step like this one would need more than there is.
    toucher.stay_ahead_of(16)
    toucher.wait()
    assert toucher._num_touched == 32


def test_layers_of_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger ones say how many blocks are touched at once; all of them are."""
    touched: list[tuple[int, int]] = []

    def madvise(start: int, num_bytes: int, _: int) -> int:
        touched.append((start, num_bytes))
        return 0

    layers = [host_memory.zeros((2, 12, heads, 16, 2048), torch.bfloat16) for heads in (4, 8)]
    toucher = PageToucher(layers)
    monkeypatch.setattr(toucher, "_madvise", madvise)
    while toucher.touch_some():
        pass
    assert len(touched) == 4 * 3
    for layer in layers:
        for part in layer:
            begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
            own = [(start, size) for start, size in touched if begin <= start + size - 1 < end]
            assert own[0][0] <= begin
            assert own[-1][0] + own[-1][1] == end
            assert all(start + size >= after for (start, size), (after, _) in itertools.pairwise(own))


@pytest.mark.parametrize("name", ["", "madvise"])
def test_a_system_that_cannot_is_no_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know what is asked, or has no such call."""
    monkeypatch.setattr("eventlm.worker.page_toucher._MADV_POPULATE_WRITE", 12345)
    kv = host_memory.zeros(SHAPE, torch.bfloat16)
    toucher = PageToucher(list(kv))
    if name:
        monkeypatch.setattr(toucher, "_madvise", None)
    toucher.begin()
    first = toucher._thread
    toucher.wait()
    # It is not tried again.
    toucher.stay_ahead_of(60)
    assert toucher._thread is first
    assert not kv.any()


def test_a_stage_may_have_no_keys_and_values() -> None:
    toucher = PageToucher([])
    toucher.begin()
    toucher.stay_ahead_of(5)
    toucher.wait()
    assert not toucher.touch_some()
