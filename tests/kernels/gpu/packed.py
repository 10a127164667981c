"""Packed matrices of random blocks, and their values."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.gpu.packed_weight import PackedWeight, empty_packed


def packed_matrix(kind: str, num_out: int, num_in: int, device: torch.device) -> tuple[PackedWeight, Tensor]:
    """A matrix that was taken in in two pieces, and its values, float32 [N, K]."""
    blocks, values = random_blocks(kind, num_out, num_in)
    matrix = empty_packed(kind, num_out, num_in, device=device)
    for rows in (slice(num_out // 2), slice(num_out // 2, num_out)):
        matrix.load(rows.start or 0, blocks[rows])
    return matrix, values.to(device)


def random_blocks(kind: str, num_out: int, num_in: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks, uint8 [N, bytes], and their values, float32 [N, K]."""
    rng = np.random.default_rng(seed)
    if not kind.startswith("I"):
        numbers = rng.normal(0.0, 0.1, (num_out, num_in)).astype(np.float32)
        type_of = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quantize(numbers, type_of)
        return torch.from_numpy(blocks), torch.from_numpy(gguf.dequantize(blocks, type_of))
    bits, group = int(kind[1]), int(kind.partition("_")[2])
    num_groups = -(-num_in // group)
    codes = rng.integers(0, 1 << bits, (num_out, num_groups, group), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (num_out, num_groups, 1)).astype(np.float32)
    zeros = rng.integers(0, (1 << bits) + 1, (num_out, num_groups, 1)).astype(np.float16)
    values = ((codes - zeros.astype(np.float32)) * scales).reshape(num_out, -1)[:, :num_in]
    packed = codes[..., 0::2] | codes[..., 1::2] << 4 if bits == 4 else codes
    blocks = np.concatenate((scales.view(np.uint8), zeros.view(np.uint8), packed), axis=-1).reshape(num_out, -1)
    return torch.from_numpy(blocks), torch.from_numpy(values.astype(np.float32))
