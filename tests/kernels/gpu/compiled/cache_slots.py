"""Launches of `cache_slots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from eventlm.kernels.gpu.cache_slots import cache_slots


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """One."""
    numbers = torch.zeros(64, dtype=torch.int32)
    yield "int32", lambda: cache_slots(numbers, numbers, torch.zeros(8, 64, dtype=torch.int32), 16)
