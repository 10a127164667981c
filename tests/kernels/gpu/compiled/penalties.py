"""Of `kernels/gpu/penalties.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.penalties import apply_penalties


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Of float32, which is what the worker has, and of bfloat16; packed as the worker does, with any number of ids."""
    for dtype in (torch.float32, torch.bfloat16):
        yield str(dtype), partial(_launch, dtype)


def _launch(dtype: torch.dtype) -> None:
    for num_ids in (1, 6, 7, 16, 1000):
        packed = torch.empty(3, 4 + 2 * num_ids, dtype=torch.int32)
        rows, penalties, ids, counts = packed.split([1, 3, num_ids, num_ids], dim=1)
        apply_penalties(torch.empty(8, 151_936, dtype=dtype), rows[:, 0], penalties.view(torch.float32), ids, counts)
