"""Products with packed matrices, of one row and of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.code_types import CODE_TYPES
from eventlm.kernels.gpu.packed_matmul import packed_matmul
from eventlm.kernels.gpu.packed_weight import empty_packed


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of all types of codes."""
    bias = torch.empty(1008, dtype=torch.bfloat16)
    for kind in CODE_TYPES:
        matrix = empty_packed(kind, 1008, 1056, device="cpu")
        for num_rows in (1, 40):
            x = torch.empty(num_rows, 1056, dtype=torch.bfloat16)
            yield f"{kind} rows {num_rows}", partial(packed_matmul, x, matrix, bias)
    offsets = torch.zeros(9, dtype=torch.int32)
    matrix = empty_packed("MXFP4", 8, 1008, 1056, device="cpu")
    for num_rows in (1, 400):
        x = torch.empty(num_rows, 1056, dtype=torch.bfloat16)
        yield f"experts rows {num_rows}", partial(packed_matmul, x, matrix, offsets_E1=offsets)
