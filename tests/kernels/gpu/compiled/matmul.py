from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.matmul import matmul


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, bias = (torch.empty(shape, dtype=dtype) for shape in [(40, 512), (1008, 512), (1008,)])
        yield f"{dtype}", partial(matmul, x, weight)
        yield f"{dtype} with a bias", partial(matmul, x, weight, bias)
    x, weight = torch.empty((40, 511), dtype=torch.bfloat16), torch.empty((1008, 511), dtype=torch.bfloat16)
    yield "odd", partial(matmul, x, weight)
