"""Of `kernels/gpu/draw_masked.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.draw_masked import draw_masked
from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Of each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield str(dtype), partial(_launch, dtype)


def _launch(dtype: torch.dtype) -> None:
    draw_masked(
        torch.empty(3, 151_936, dtype=dtype),
        torch.empty(3, len(DRAW_COLUMNS), dtype=torch.int32),
        torch.empty(3, dtype=torch.int32),
    )
