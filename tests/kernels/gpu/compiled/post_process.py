from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.post_process import post_process


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    values = torch.empty(100_000)
    yield "compute", partial(post_process, values, iterations=5, mode="compute")
    yield "memory", partial(post_process, values, iterations=5, mode="memory")
