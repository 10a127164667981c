"""Keyed noise: what decides a draw is a hash of (request's seed, sample's index, position in its output, token).

It does not depend on the neighbours in the batch, on earlier draws, or on what masks left of the vocabulary, so a
sequence that is recomputed draws what it drew before. A token is drawn as the argmax of its scaled logit plus Gumbel
noise (Gumbel, 1954; Maddison et al., 2014).

Shapes: S rows, C vocabulary entries.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
#: A bit below 2^-31, so that the largest 31-bit integer, rounded up as a float, stays below 1.
_UNIT = 2.0**-31 * (1.0 - 2.0**-24)


def sequence_key(seed: int, index: int) -> int:
    """A sequence's 64-bit key, made once."""
    return int.from_bytes(blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest(), "little")


def step_keys(sequence_keys_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
    """Two 32-bit keys a row, int32 [S, 2], from its sequence's key (uint64) and its position in the output (from 0).

    The position steps through SplitMix64 (Steele et al., 2014).
    """
    bits = sequence_keys_S + (positions_S.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    keys: np.ndarray = bits.view(np.int32).reshape(-1, 2)
    return keys


def noise_keys(sequence_keys_S: np.ndarray, positions_S: np.ndarray, device: torch.device) -> Tensor:
    """`step_keys` on a device."""
    return torch.from_numpy(step_keys(sequence_keys_S, positions_S)).to(device)


def hash_ids(ids: Tensor) -> Tensor:
    """A bijective hash of int32 token ids ("lowbias32", Wellons, 2018), in wrap-around arithmetic.

    It is mixed in before the keys, so it can be kept for a whole vocabulary.
    """
    bits = ids ^ _shift_right(ids, 16)
    bits.mul_(0x7FEB352D)
    bits.bitwise_xor_(_shift_right(bits, 15))
    bits.mul_(0x846CA68B - (1 << 32))
    return bits.bitwise_xor_(_shift_right(bits, 16))


def negative_gumbel_noise(keys_S2: Tensor, hashed_ids: Tensor) -> Tensor:
    """Gumbel noise with its sign changed, float32 [S, C]: subtract it.

    keys_S2: see `noise_keys`. hashed_ids: see `hash_ids`, int32 [C] or [S, C].
    """
    key_0, key_1 = keys_S2.unsqueeze(-1).unbind(1)
    bits = hashed_ids ^ key_0
    bits.mul_(0x21F0AAAD)
    # The sign moves in from the left, which costs a bit of 32 and a pass less than zeros would.
    bits.bitwise_xor_(bits >> 15)
    bits.bitwise_xor_(key_1).mul_(0x735A2D97)
    # Here it leaves a number of 31 bits without a sign.
    bits.bitwise_xor_(bits >> 16)
    # In (0, 1), and fine-grained near 0, where the largest noise comes from.
    uniform = bits.to(torch.float32).add_(0.5).mul_(-_UNIT)
    return uniform.log1p_().neg_().log_()


def _shift_right(bits: Tensor, indices: int) -> Tensor:
    """Zeros move in from the left, as if the integers were unsigned."""
    return (bits >> indices).bitwise_and_((1 << (32 - indices)) - 1)
