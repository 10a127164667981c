from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.grouped_gemm import grouped_gemm


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    offsets = torch.zeros(61, dtype=torch.int32)
    for dtype, T in [(torch.bfloat16, 512), (torch.bfloat16, 2000), (torch.bfloat16, 8000), (torch.float32, 512)]:
        x, weight = torch.empty((T, 256), dtype=dtype), torch.empty((60, 208, 256), dtype=dtype)
        yield f"{dtype}, {T} rows", partial(grouped_gemm, x, weight, offsets, max_rows=T)
    x, weight = torch.empty((512, 255), dtype=torch.bfloat16), torch.empty((60, 208, 255), dtype=torch.bfloat16)
    yield "odd", partial(grouped_gemm, x, weight, offsets, max_rows=512)
