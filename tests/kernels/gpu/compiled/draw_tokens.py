"""Of `kernels/gpu/draw_tokens.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS, draw_tokens


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Few rows, that are split into many parts, and many. With limits: see `draw_masked`."""
    for num_rows, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (1, torch.float16), (1, torch.float32)):
        yield f"{num_rows} {dtype}", partial(_launch, num_rows, dtype)


def _launch(num_rows: int, dtype: torch.dtype) -> None:
    draw_tokens(
        torch.empty(num_rows, 151_936, dtype=dtype),
        torch.empty(num_rows, len(DRAW_COLUMNS), dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.int32),
    )
