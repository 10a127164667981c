"""Draws a token of each row of logits: the most likely one, or the argmax of scaled logits plus keyed Gumbel noise.

The reference is the worker's sampler in torch, `eventlm/worker/sampling/sampler.py`. How a row draws is six numbers of
32 bits, packed so that they travel in one copy.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

import eventlm.kernels.gpu.interpreter  # noqa: F401 - its mend
from eventlm.kernels.gpu.tuned import ceil_div, next_power_of_2, tuned

#: Columns of `draws_S6`: temperature (float32; 0 is greedy), the two keys of this draw's noise, top_k (0: none), top_p
#: (float32; 1 and more: none), and the logarithm of min_p (float32; minus infinity: none).
DRAW_COLUMNS = ("temperature", "key_0", "key_1", "top_k", "top_p", "log_min_p")

#: Programs that are enough to keep a GPU busy; beyond them each takes more of a row.
_NUM_PROGRAMS = 1024
#: What a program takes of a row at the most.
_LARGEST_SPLIT = 16_384


def draw_tokens(logits_SV: Tensor, draws_S6: Tensor, out_S: Tensor, *, limits_S2: Tensor | None = None) -> None:
    """Write each row's token id to `out_S`, int32; of equal scores the lowest.

    logits_SV: bfloat16, float16 or float32, the entries of a row side by side. A row with NaN or plus infinity gives -1
    instead of an id, one of nothing but minus infinity 0. draws_S6: int32, see `DRAW_COLUMNS`; only the first three are
    read. limits_S2: int32, contiguous, what masks leave of each row, see `draw_masked.mask_limits`; None: all.
    """
    num_rows, vocab_size = logits_SV.shape
    if not num_rows:
        return
    config = tuned("draw_tokens")
    split = next_power_of_2(ceil_div(num_rows * vocab_size, _NUM_PROGRAMS))
    split = min(max(split, config["BLOCK"]), _LARGEST_SPLIT)
    num_splits = ceil_div(vocab_size, split)
    partial = torch.empty((num_rows, num_splits), dtype=torch.int64, device=logits_SV.device)
    _draw_splits[(num_rows, num_splits)](
        logits_SV,
        logits_SV.stride(0),
        draws_S6,
        draws_S6.stride(0),
        limits_S2,
        partial,
        vocab_size,
        split,
        SHIFT=shift_of(logits_SV.dtype),
        **config,
    )
    _draw_rows[(num_rows,)](partial, out_S, num_splits, NUM_SPLITS=next_power_of_2(num_splits), num_warps=1)


@triton.jit
def _draw_splits(
    logits,
    logits_stride,
    draws,
    draws_stride,
    limits,
    partial,
    vocab_size,
    split,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of a part of a row, as an integer: what has more of them goes before, the lower id of equals."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + row * draws_stride
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    key_0, key_1 = tl.load(draw + 1), tl.load(draw + 2)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    if limits is not None:
        last_key, last_id = tl.load(limits + 2 * row), tl.load(limits + 2 * row + 1)
    begin = place * split
    ids = begin + tl.arange(0, BLOCK)
    best, best_ids = tl.full((BLOCK,), float("-inf"), tl.float32), ids
    for _ in range(begin, tl.minimum(begin + split, vocab_size), BLOCK):
        scores = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        # NaN counts as infinity, which `_draw_rows` finds.
        scores = tl.where(scores < float("inf"), scores, float("inf"))
        if limits is not None:
            keys = order_keys(scores, SHIFT)
            is_kept = (keys > last_key) | ((keys == last_key) & (ids <= last_id))
            scores = tl.where(is_kept, scores, float("-inf"))
        # Where masks leave nothing, noise would be for nothing.
        if limits is None or tl.max(scores, axis=0) > float("-inf"):
            if temperature > 0.0:
                scores = scores * scale - negative_gumbel_noise(ids, key_0, key_1)
            is_better = scores > best
            best = tl.where(is_better, scores, best)
            best_ids = tl.where(is_better, ids, best_ids)
        ids += BLOCK
    ranks = (order_keys(best, 0).to(tl.int64) << 32) - best_ids
    tl.store(partial + row * tl.num_programs(1) + place, tl.max(ranks, axis=0))


@triton.jit
def _draw_rows(partial, out, num_splits, NUM_SPLITS: tl.constexpr):
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, NUM_SPLITS)
    ranks = tl.load(partial + row * num_splits + places, mask=places < num_splits, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(ranks, axis=0)
    # The id is what is missing to the next multiple of 2^32. Above is the key of the largest finite number.
    tl.store(out + row, tl.where(best > 0x7F7FFFFF_00000000, -1, (-best).to(tl.int32)))


def shift_of(dtype: torch.dtype) -> int:
    """Bits at the end that float32 has and numbers of this dtype do not use: `order_keys` can do without them."""
    return {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[dtype]


@triton.jit
def order_keys(x, SHIFT: tl.constexpr):
    """float32 as int32 in the same order. Both zeros are the same; the last `SHIFT` bits, all zero, are left out."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(key, SHIFT: tl.constexpr):
    """The float32 with this key."""
    # What was shifted out of a negative number's key were ones.
    bits = (key << SHIFT) | ((key >> 31) & ((1 << SHIFT) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def negative_gumbel_noise(ids, key_0, key_1):
    """Noise of token ids under a row's two keys, all int32, with its sign changed, float32: subtract it.

    That of `eventlm/worker/sampling/noise.py`, with logarithms rounded otherwise.
    """
    bits = ids.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16) ^ key_0.to(tl.uint32, bitcast=True)
    bits = bits * 0x21F0AAAD
    # The sign moves in from the left, here and below.
    bits = bits ^ (bits.to(tl.int32, bitcast=True) >> 15).to(tl.uint32, bitcast=True)
    bits = (bits ^ key_1.to(tl.uint32, bitcast=True)) * 0x735A2D97
    signed = bits.to(tl.int32, bitcast=True)
    number = signed ^ (signed >> 16)
    # A bit below 2^-31, so that the largest 31-bit integer, rounded up, stays below 1.
    uniform = (number.to(tl.float32) + 0.5) * 4.656612595521636e-10
    return _log(-_log1p(-uniform))


@triton.jit
def _log(x):
    """Natural logarithm of positive normal numbers, to some units in the last place. Triton's is slower."""
    # x = (1 + rest) * 2^exponent, with rest between -1/3 and 1/3.
    bits = x.to(tl.int32, bitcast=True)
    shifted = (bits - 0x3F2AAAAB) & -0x800000
    return _log_of_parts((bits - shifted).to(tl.float32, bitcast=True) - 1.0, shifted)


@triton.jit
def _log1p(x):
    """The same of 1 + x, without losing what is small, for x between -1 and 0."""
    shifted = ((1.0 + x).to(tl.int32, bitcast=True) - 0x3F2AAAAB) & -0x800000
    scale = (0x3F800000 - shifted).to(tl.float32, bitcast=True)
    return _log_of_parts(x * scale + (scale - 1.0), shifted)


@triton.jit
def _log_of_parts(rest, shifted):
    # The best polynomial of its degree for log(1 + rest).
    p = 0.13838342 * rest - 0.15140387
    p = p * rest + 0.14039221
    p = p * rest - 0.16469736
    p = p * rest + 0.20008066
    p = p * rest - 0.25004321
    p = p * rest + 0.33333266
    p = (p * rest - 0.5) * (rest * rest) + rest
    return (shifted >> 23).to(tl.float32) * 0.6931472 + p
