"""Merging of attention, with the log-sum-exps and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from eventlm.kernels.gpu.merge_attention import merge_attention


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Two devices' parts, and many splits."""
    for num_parts, head_dim, with_lse in ((2, 128, True), (32, 128, False), (64, 256, False)):
        lse = torch.zeros(3, 4) if with_lse else None
        partial, out = torch.zeros(3, 4, num_parts, head_dim), torch.zeros(3, 4, head_dim, dtype=torch.bfloat16)
        launch = functools.partial(merge_attention, partial, torch.zeros(3, 4, num_parts), out, lse)
        yield f"{num_parts} parts of {head_dim}", launch
