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
from eventlm.kernels.gpu.noise import negative_gumbel_noise
from eventlm.kernels.gpu.order import order_keys, shift_of
from eventlm.kernels.gpu.sizes import ceil_div, next_power_of_2
from eventlm.kernels.gpu.tuned import tuned

#: Columns of `draws_S6`: temperature (float32; 0 is greedy), the two keys of this draw's noise, top_k (0: none), top_p
#: (float32; 1 and more: none), and the logarithm of min_p (float32; minus infinity: none).
DRAW_COLUMNS = ("temperature", "key_0", "key_1", "top_k", "top_p", "log_min_p")

#: Programs that are enough to keep a GPU busy; beyond them each takes more of a row.
_NUM_PROGRAMS = 1024
#: What a program takes of a row at the most.
_LARGEST_SPLIT = 16_384


def draw_tokens(logits_SV: Tensor, draws_S6: Tensor, out_S: Tensor, *, limits_S2: Tensor | None = None) -> None:
    """Write each row's token id to `out_S`, int32; of equal scores the lowest.

    logits_SV: bfloat16, float16 or float32, the entries of a row side by side. NaN is as minus infinity, and a row of
    nothing else gives id 0. draws_S6: int32, see `DRAW_COLUMNS`; only the first three are read. limits_S2: int32,
    contiguous, what masks leave of each row, see `draw_masked.mask_limits`; None: all.
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
    # The id is what is missing to the next multiple of 2^32.
    tl.store(out + row, (-tl.max(ranks, axis=0)).to(tl.int32))
