"""Of `kernels/gpu/penalties.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.penalties import apply_penalties


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Of float32, which is what the worker has, and of bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        yield str(dtype), partial(_launch, dtype)


def _launch(dtype: torch.dtype) -> None:
    packed = torch.empty(3, 4 + 2 * 1000, dtype=torch.int32)
    rows, penalties, ids, counts = packed.split([1, 3, 1000, 1000], dim=1)
    apply_penalties(torch.empty(8, 151_936, dtype=dtype), rows[:, 0], penalties.view(torch.float32), ids, counts)
