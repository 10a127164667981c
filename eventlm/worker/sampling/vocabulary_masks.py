"""Masks over the vocabulary: one bit a token, packed in bytes from the lowest bit on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Masks(NamedTuple):
    """Which tokens the rows `numbers` [R] of the sampled ones may have: uint8 [R, mask_bytes]."""

    numbers: np.ndarray
    bits: np.ndarray


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask."""
    return (vocab_size + 7) // 8


def unpack_mask(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Packed masks [..., mask_bytes] as booleans [..., vocab_size]."""
    return np.unpackbits(mask, axis=-1, count=vocab_size, bitorder="little").view(bool)
