"""Memory that kernels on CPUs read and write by whole cache lines."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LINE_BYTES = 64


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that begins on a cache line, of huge pages where it is large and the system has them (numpy asks)."""
    return _from_bytes(np.empty(_num_bytes(shape, dtype) + _LINE_BYTES, dtype=np.uint8), shape, dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same with zeros, which the system gives page by page when one is first touched.

    torch would write all of them at once, which takes seconds for gigabytes.
    """
    return _from_bytes(np.zeros(_num_bytes(shape, dtype) + _LINE_BYTES, dtype=np.uint8), shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _from_bytes(memory: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # The allocator puts its own 16 bytes in front of large pieces.
    begin = -memory.ctypes.data % _LINE_BYTES
    return torch.from_numpy(memory[begin : begin + _num_bytes(shape, dtype)]).view(dtype).view(shape)
