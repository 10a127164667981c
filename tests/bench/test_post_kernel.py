"""The kernel behind answers, on the GPU or in the interpreter."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
import torch
import triton

from eventlm.bench.post_kernel import PostKernel
from eventlm.errors import UsageError


async def test_it_runs_so_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    kernel = PostKernel(15, local_rank=0)
    run = kernel._kernel

    def kept(values: torch.Tensor, **settings: Any) -> torch.Tensor:
        made.append(run(values, **settings))
        return made[-1]

    monkeypatch.setattr(kernel, "_kernel", kept)
    assert await kernel() > 0
    # Each round turns by 0.1 radians.
    assert made[0][0].item() == pytest.approx(torch.tensor(1.5).cos().item(), abs=1e-4)
    assert kernel.is_on_gpu == (not triton.knobs.runtime.interpret)
    assert ("interpreter" in kernel.place) == (not kernel.is_on_gpu)


async def test_those_that_wait_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    started, drops = threading.Event(), threading.Event()
    kernel = PostKernel(1, local_rank=0)

    def slow(*_: Any, **__: Any) -> None:
        started.set()
        assert drops.wait(30)

    monkeypatch.setattr(kernel, "_kernel", slow)
    running = asyncio.gather(*(kernel() for _ in range(3)))
    assert await asyncio.to_thread(started.wait, 30)
    kernel.drop_waiting()
    drops.set()
    first, *others = await running
    assert first is not None
    assert others == [None, None]
    # It waits for nothing.
    assert await kernel() is not None


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "eventlm.kernels.gpu.post_process", None)
    with pytest.raises(UsageError, match=r"--post-kernel needs Triton: pip install 'eventlm\[gpu\]'"):
        PostKernel(1, local_rank=0)
