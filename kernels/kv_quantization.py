"""Keys and values in one byte an element: symmetric 8-bit integers, or fp8 (e4m3).

A token's head is its D elements and then, in 4 bytes, the float32 that they are to be multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
#: What a cache tensor of each is; fp8 as its bytes.
STORED_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
_LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


def is_quantized(kv_cache: Tensor) -> bool:
    """Whether a cache tensor holds what `quantize` gives."""
    return kv_cache.dtype in _LARGEST


def quantize(values: Tensor, stored: torch.dtype) -> Tensor:
    """[..., D] of any floating type to [..., D + 4] of one of STORED_DTYPES.

    What has no element above 1e-30 becomes zeros: the inverse of its scale might be infinite.
    """
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, _LARGEST[stored] / largest, 0)
    scaled = (values * inverse).clamp(-_LARGEST[stored], _LARGEST[stored])
    elements = scaled.round().to(torch.int8) if stored == torch.int8 else scaled.to(torch.float8_e4m3fn)
    scales = largest / _LARGEST[stored]
    return torch.cat((elements.view(stored), scales.view(stored)), dim=-1)


def dequantize(quantized: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D + 4] of `quantize` to [..., D] of `dtype`."""
    elements, scales = quantized.split((quantized.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    if quantized.dtype != torch.int8:
        elements = elements.contiguous().view(torch.float8_e4m3fn)
    values: Tensor = elements.float() * scales.contiguous().view(torch.float32)
    return values.to(dtype)
