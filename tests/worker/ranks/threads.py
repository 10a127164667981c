"""Ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class ThreadGroup:
    """Threads that gather tensors from each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def gather_of(self, rank: int) -> Callable[[Tensor], Tensor]:
        """What a rank calls."""

        def gather(mine: Tensor) -> Tensor:
            self._given[rank] = mine
            self._barrier.wait()
            everything = torch.stack(self._given)
            self._barrier.wait()
            return everything

        return gather


def on_all(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """The results of calls that are made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]
