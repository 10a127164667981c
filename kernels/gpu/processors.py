"""How many programs of a kernel a device runs at a time, for kernels whose programs do several pieces of work each."""

from __future__ import annotations

import functools

import torch

#: In the interpreter: few enough that tests see programs that do several pieces.
_INTERPRETED = 3


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number for the CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
