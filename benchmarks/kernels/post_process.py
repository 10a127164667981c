"""Load of a set size: 100 GFLOP, and 4 GB in passes over more than the L2 holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from eventlm.kernels.gpu.post_process import Mode, iterations_for, post_process, post_process_reference, work


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Arithmetic alone, and bandwidth alone."""
    sizes: list[tuple[Mode, int, float]] = [("compute", 1 << 20, 100e9), ("memory", 1 << 27, 4e9)]
    if smoke:
        sizes = [("compute", 2000, 1e5), ("memory", 2000, 5e4)]
    for mode, num_values, amount in sizes:
        values = torch.randn(num_values, generator=torch.Generator(device).manual_seed(1), device=device)
        iterations = iterations_for(amount, num_values, mode=mode)
        done = work(num_values, iterations=iterations, mode=mode)
        yield KernelCase(
            name=f"post_process {mode}, {amount / 1e9:g} {'GFLOP' if mode == 'compute' else 'GB'}",
            run=partial(post_process, values, iterations=iterations, mode=mode),
            reference=partial(post_process_reference, values, iterations=iterations, mode=mode),
            num_bytes=done.num_bytes,
            num_flops=done.num_flops,
            peer=partial(_peer, values, iterations) if mode == "memory" else None,
            peer_name="torch, an addition at a time",
            target=0.85 if mode == "memory" else 0.0,
        )


def _peer(values: Tensor, iterations: int) -> Tensor:
    out = values + 1
    for _ in range(iterations - 1):
        out += 1
    return out
