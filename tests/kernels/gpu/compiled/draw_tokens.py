"""Of `kernels/gpu/draw_tokens.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS, draw_tokens


def launches() -> Iterator[tuple[str, Callable[[], None]]]:
    """Few rows, that are split into many parts, and many; with and without limits."""
    for num_rows, dtype, limited in (
        (1, torch.bfloat16, False),
        (64, torch.bfloat16, False),
        (1, torch.bfloat16, True),
        (1, torch.float16, True),
        (1, torch.float32, False),
        (1, torch.float32, True),
    ):
        yield f"{num_rows} {dtype}{' limited' * limited}", partial(_launch, num_rows, dtype, limited)


def _launch(num_rows: int, dtype: torch.dtype, limited: bool) -> None:
    draw_tokens(
        torch.empty(num_rows, 151_936, dtype=dtype),
        torch.empty(num_rows, len(DRAW_COLUMNS), dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.int32),
        limits_S2=torch.empty(num_rows, 2, dtype=torch.int32) if limited else None,
    )
