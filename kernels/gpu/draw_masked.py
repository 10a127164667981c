"""What min-p, then top-k, then top-p leave of each row of logits, found without sorting, and draws from that.

Entries are in an order: the larger logit first, the lower id first of equals. Each mask leaves the first ones, so what
is left is said by the last of them. Its key (see `order.py`) is searched for among all that a key can be: each pass
over a row, which stays in the GPU's cache, asks for some keys how many entries have at least that key, or how much of
the probability. The reference is the worker's sampler in torch, `eventlm/worker/candidates.py`.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.draw_tokens import draw_tokens
from eventlm.kernels.gpu.order import number_of, order_keys, shift_of
from eventlm.kernels.gpu.tuned import tuned


def draw_masked(logits_SV: Tensor, draws_S6: Tensor, out_S: Tensor) -> None:
    """`draw_tokens` of a batch in which some rows have masks: all columns of `draws_S6` are read."""
    limits = torch.empty((len(logits_SV), 2), dtype=torch.int32, device=logits_SV.device)
    mask_limits(logits_SV, draws_S6, limits)
    draw_tokens(logits_SV, draws_S6, out_S, limits_S2=limits)


def mask_limits(logits_SV: Tensor, draws_S6: Tensor, limits_S2: Tensor) -> None:
    """Write the key and the id of the last entry that each row's masks leave to `limits_S2`, int32, contiguous.

    top-p leaves the fewest entries that together have at least top_p of what min-p and top-k left. The best entry is
    always left. A greedy row, or one without masks, is left all. logits_SV, draws_S6: as for `draw_tokens`.
    """
    num_rows, vocab_size = logits_SV.shape
    if not num_rows:
        return
    config = tuned("mask_limits")
    config = config | {"BLOCK": min(config["BLOCK"], triton.next_power_of_2(vocab_size))}
    _mask_limits[(num_rows,)](
        logits_SV,
        logits_SV.stride(0),
        draws_S6,
        draws_S6.stride(0),
        limits_S2,
        vocab_size,
        SHIFT=shift_of(logits_SV.dtype),
        **config,
    )


@triton.jit
def _mask_limits(
    logits, logits_stride, draws, draws_stride, limits, vocab_size, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    draw = draws + row * draws_stride
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    top_k, top_p = tl.load(draw + 3), tl.load(draw + 4).to(tl.float32, bitcast=True)
    log_min_p = tl.load(draw + 5).to(tl.float32, bitcast=True)
    last_key, last_id = -0x7FFFFFFF, vocab_size
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))):
        last_key, last_id = _last_left(
            logits + row * logits_stride, vocab_size, temperature, top_k, top_p, log_min_p, SHIFT, BLOCK
        )
    tl.store(limits + 2 * row, last_key)
    tl.store(limits + 2 * row + 1, last_id)


@triton.jit
def _last_left(row, vocab_size, temperature, top_k, top_p, log_min_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    best, least = _extremes(row, vocab_size, BLOCK)
    # An entry's mass is its probability over that of the best one.
    scale = 1.0 / temperature
    count, mass, last_key = _above_floor(row, vocab_size, best, temperature, log_min_p, SHIFT, BLOCK)
    # Of the entries with the last key so many are left, and so many there are, where that is known to matter.
    num_left, num_equal = vocab_size, 0
    if (top_k > 0) & (top_k < count):
        last_key = _search(row, vocab_size, best, scale, least, last_key, top_k.to(tl.float32), False, SHIFT, BLOCK)
        num_above, mass, num_equal = _above(row, vocab_size, best, scale, last_key, SHIFT, BLOCK)
        num_left = top_k - num_above
        mass += num_left * tl.exp((number_of(last_key, SHIFT) - best) * scale)
    if top_p < 1.0:
        # What has less than e^-32 of the best one's probability hardly counts.
        low = tl.maximum(best - 32.0 * temperature, least)
        key = _search(row, vocab_size, best, scale, low, last_key, top_p * mass, True, SHIFT, BLOCK)
        num_above, mass_above, num_equal = _above(row, vocab_size, best, scale, key, SHIFT, BLOCK)
        each = tl.exp((number_of(key, SHIFT) - best) * scale)
        missing = tl.ceil((top_p * mass - mass_above) / tl.maximum(each, 1e-37))
        num_in_nucleus = tl.minimum(tl.maximum(missing, 1.0), num_equal.to(tl.float32)).to(tl.int32)
        num_left = tl.where(key == last_key, tl.minimum(num_left, num_in_nucleus), num_in_nucleus)
        last_key = key
    last_id = vocab_size
    if num_left < num_equal:
        last_id = _id_of_equal(row, vocab_size, last_key, num_left, SHIFT, BLOCK)
    return last_key, last_id


@triton.jit
def _extremes(row, vocab_size, BLOCK: tl.constexpr):
    """The largest and the smallest number, infinities and NaN aside."""
    best, least = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.where(x > best, x, best)
        least = tl.where((x > float("-inf")) & (x < least), x, least)
    return tl.max(best, axis=0), tl.min(least, axis=0)


@triton.jit
def _above_floor(row, vocab_size, best, temperature, log_min_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the entries that min-p leaves: how many, their mass and the smallest key."""
    floor = tl.div_rn(best, temperature) + log_min_p
    counts, masses = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float32)
    least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        # Divided as the reference does, for what is at the floor.
        is_left = (tl.div_rn(x, temperature) >= floor) & (ids < vocab_size)
        counts += is_left.to(tl.int32)
        masses += tl.where(is_left, tl.exp((x - best) * (1.0 / temperature)), 0.0)
        least = tl.minimum(least, tl.where(is_left, order_keys(x, SHIFT), 0x7FFFFFFF))
    # The best one is left whatever rounding says.
    least_key = tl.minimum(tl.min(least, axis=0), order_keys(best, SHIFT))
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), least_key


@triton.jit
def _above(row, vocab_size, best, scale, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the entries with a larger key: how many, and their mass. How many have this one."""
    counts, equals = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        keys = order_keys(x, SHIFT)
        counts += (keys > key).to(tl.int32)
        equals += ((keys == key) & (ids < vocab_size)).to(tl.int32)
        masses += tl.where(keys > key, tl.exp((x - best) * scale), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.sum(equals, axis=0)


@triton.jit
def _search(
    row, vocab_size, best, scale, low, low_key, wanted, BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key such that the entries with at least that key are, or have a mass of, at least `wanted`.

    Those with at least `low_key` are known to do. `low` is a guess of a number below it, for speed.
    """
    high_key = order_keys(best, SHIFT) + 1
    while high_key > low_key + 1:
        # Three keys halve the distance twice where they are of numbers at equal distances, as most keys are close to
        # zero; the fourth, between all keys, does it once in any case.
        key_0 = (low_key >> 1) + (high_key >> 1) + (low_key & high_key & 1)
        left = tl.maximum(number_of(low_key, SHIFT), low)
        quarter = (number_of(high_key - 1, SHIFT) - left) * 0.25
        key_1 = _between(left + quarter, low_key, high_key, SHIFT)
        key_2 = _between(left + 2.0 * quarter, low_key, high_key, SHIFT)
        key_3 = _between(left + 3.0 * quarter, low_key, high_key, SHIFT)
        sums_0, sums_1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        sums_2, sums_3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, vocab_size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            keys = order_keys(x, SHIFT)
            if BY_MASS:
                amounts = tl.exp((x - best) * scale)
            else:
                amounts = tl.full((BLOCK,), 1.0, tl.float32)
            sums_0 += tl.where(keys >= key_0, amounts, 0.0)
            sums_1 += tl.where(keys >= key_1, amounts, 0.0)
            sums_2 += tl.where(keys >= key_2, amounts, 0.0)
            sums_3 += tl.where(keys >= key_3, amounts, 0.0)
        low_key, high_key = _narrowed(low_key, high_key, key_0, tl.sum(sums_0, axis=0) >= wanted)
        low_key, high_key = _narrowed(low_key, high_key, key_1, tl.sum(sums_1, axis=0) >= wanted)
        low_key, high_key = _narrowed(low_key, high_key, key_2, tl.sum(sums_2, axis=0) >= wanted)
        low_key, high_key = _narrowed(low_key, high_key, key_3, tl.sum(sums_3, axis=0) >= wanted)
    return low_key


@triton.jit
def _between(x, low_key, high_key, SHIFT: tl.constexpr):
    """The key of `x`, or the nearest one between the two."""
    return tl.minimum(tl.maximum(order_keys(x, SHIFT), low_key + 1), high_key - 1)


@triton.jit
def _narrowed(low_key, high_key, key, is_enough):
    low_key = tl.where(is_enough, tl.maximum(low_key, key), low_key)
    return low_key, tl.where(is_enough, high_key, tl.minimum(high_key, key))


@triton.jit
def _id_of_equal(row, vocab_size, key, number, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the entry that is the `number`-th, from 1, of those with this key, in the order of ids."""
    begin, num_seen, found = 0, 0, vocab_size
    while num_seen < number:
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_equal = ((order_keys(x, SHIFT) == key) & (ids < vocab_size)).to(tl.int32)
        num_equal = tl.sum(is_equal, axis=0)
        if num_seen + num_equal >= number:
            is_it = (tl.cumsum(is_equal, axis=0) == number - num_seen) & (is_equal > 0)
            found = tl.min(tl.where(is_it, ids, vocab_size), axis=0)
        num_seen += num_equal
        begin += BLOCK
    return found
