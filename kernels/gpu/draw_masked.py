"""What min-p, then top-k, then top-p leave of each row of logits, found without sorting, and draws from that.

Entries are in an order: the larger logit first, the lower id first of equals. Each mask leaves the first ones, so what
is left is said by the last of them. Its key (see `order_keys`) is searched for among all that a key can be: each pass
over a row, which stays in the GPU's cache, asks for some keys how many entries have at least that key, or how much of
the probability. As soon as few entries can matter they are written together, and the rest of the passes is over those.
The reference is the worker's sampler in torch, `eventlm/worker/sampling/candidates.py`.

Shapes: S rows, V vocabulary, C entries of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.draw_tokens import draw_tokens, number_of, order_keys, shift_of
from eventlm.kernels.gpu.tuned import next_power_of_2, tuned


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
    config = config | {"BLOCK": min(config["BLOCK"], next_power_of_2(vocab_size))}
    few_SC = torch.empty((num_rows, config["BLOCK"]), dtype=logits_SV.dtype, device=logits_SV.device)
    _mask_limits[(num_rows,)](
        logits_SV,
        logits_SV.stride(0),
        draws_S6,
        draws_S6.stride(0),
        limits_S2,
        few_SC,
        torch.empty_like(few_SC, dtype=torch.int32),
        vocab_size,
        SHIFT=shift_of(logits_SV.dtype),
        **config,
    )


@triton.jit
def _mask_limits(
    logits,
    logits_stride,
    draws,
    draws_stride,
    limits,
    few,
    few_ids,
    vocab_size,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    draw = draws + number * draws_stride
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    top_k, top_p = tl.load(draw + 3), tl.load(draw + 4).to(tl.float32, bitcast=True)
    log_min_p = tl.load(draw + 5).to(tl.float32, bitcast=True)
    last_key, last_id = -0x7FFFFFFF, vocab_size
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))):
        row = logits + number * logits_stride
        best, least = _extremes(row, vocab_size, BLOCK)
        # An entry's mass is its probability over that of the best one.
        scale = 1.0 / temperature
        count, mass, last_key = _above_floor(row, vocab_size, best, temperature, log_min_p, SHIFT, BLOCK)
        # A row with NaN or infinity has no token, whatever is left of it.
        is_finite = best < float("inf")
        top_k = tl.where((top_k < count) & is_finite, top_k, 0)
        if (top_k > 0) | ((top_p < 1.0) & is_finite):
            if top_k > 0:
                last_key = _search(
                    row, vocab_size, best, scale, least, last_key, count, top_k, BLOCK, False, SHIFT, BLOCK
                )
            else:
                # All that is below has at most half of what top-p may leave out.
                cut = best + temperature * tl.log((1.0 - top_p) * mass / (2.0 * count))
                last_key = tl.maximum(last_key, order_keys(cut, SHIFT))
            few += number * BLOCK
            few_ids += number * BLOCK
            num_few = _gather(row, vocab_size, last_key, few, few_ids, SHIFT, BLOCK)
            if num_few <= BLOCK:
                last_key, place = _last_left(
                    few, num_few, best, least, temperature, mass, last_key, top_k, top_p, SHIFT, BLOCK
                )
                last_id = tl.load(few_ids + place, mask=place < num_few, other=vocab_size)
            else:
                last_key, last_id = _last_left(
                    row, vocab_size, best, least, temperature, mass, last_key, top_k, top_p, SHIFT, BLOCK
                )
    tl.store(limits + 2 * number, last_key)
    tl.store(limits + 2 * number + 1, last_id)


@triton.jit
def _last_left(
    row, size, best, least, temperature, mass, last_key, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Key and place of the last of `size` entries that top-k and top-p leave; place `size`: all with that key.

    The entries with at least `last_key` are known to be enough for top-k, where that holds (it is not 0), else for
    top-p. `mass`: what min-p leaves.
    """
    scale = 1.0 / temperature
    # Of the entries with the last key so many are left, and so many there are, where that is known to matter.
    num_left, num_equal = size, 0
    if top_k > 0:
        last_key = _search(row, size, best, scale, least, last_key, 1, top_k, 0, False, SHIFT, BLOCK)
        num_above, mass, num_equal = _above(row, size, best, scale, last_key, SHIFT, BLOCK)
        num_left = top_k - num_above
        mass += num_left * tl.exp((number_of(last_key, SHIFT) - best) * scale)
    if top_p < 1.0:
        # What has less than e^-32 of the best one's probability hardly counts.
        low = tl.maximum(best - 32.0 * temperature, least)
        wanted = top_p * mass
        key = _search(row, size, best, scale, low, last_key, 1, wanted, 0, True, SHIFT, BLOCK)
        num_above, mass_above, num_equal = _above(row, size, best, scale, key, SHIFT, BLOCK)
        each = tl.exp((number_of(key, SHIFT) - best) * scale)
        missing = tl.ceil((wanted - mass_above) / tl.maximum(each, 1e-37))
        num_in_nucleus = tl.minimum(tl.maximum(missing, 1.0), num_equal.to(tl.float32)).to(tl.int32)
        num_left = tl.where(key == last_key, tl.minimum(num_left, num_in_nucleus), num_in_nucleus)
        last_key = key
    place = size
    if num_left < num_equal:
        place = _place_of_equal(row, size, last_key, num_left, SHIFT, BLOCK)
    return last_key, place


@triton.jit
def _extremes(row, vocab_size, BLOCK: tl.constexpr):
    """The largest number, infinity if any is NaN, and the smallest that is not minus infinity."""
    best, least = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("inf"), tl.float32)
    for begin in range(0, vocab_size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.where(x <= best, best, tl.where(x < float("inf"), x, float("inf")))
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
def _above(row, size, best, scale, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the entries with a larger key: how many, and their mass. How many have this one."""
    counts, equals = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        keys = order_keys(x, SHIFT)
        counts += (keys > key).to(tl.int32)
        equals += ((keys == key) & (ids < size)).to(tl.int32)
        masses += tl.where(keys > key, tl.exp((x - best) * scale), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.sum(equals, axis=0)


@triton.jit
def _search(
    row,
    size,
    best,
    scale,
    low,
    low_key,
    amount,
    wanted,
    enough,
    BY_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key such that the entries with at least that key are, or have a mass of, at least `wanted`; or a
    smaller one, if that leaves no more than `enough`.

    Those with at least `low_key` are known to do, with this `amount`. `low` is a guess of a number below the one that
    is searched for, so that it is soon found.
    """
    amount, wanted = amount * 1.0, wanted * 1.0
    high_key = order_keys(best, SHIFT) + 1
    while (high_key > low_key + 1) & (amount > enough):
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
        for begin in range(0, size, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            keys = order_keys(x, SHIFT)
            if BY_MASS:
                amounts = tl.exp((x - best) * scale)
            else:
                amounts = tl.full((BLOCK,), 1.0, tl.float32)
            sums_0 += tl.where(keys >= key_0, amounts, 0.0)
            sums_1 += tl.where(keys >= key_1, amounts, 0.0)
            sums_2 += tl.where(keys >= key_2, amounts, 0.0)
            sums_3 += tl.where(keys >= key_3, amounts, 0.0)
        low_key, high_key, amount = _narrowed(low_key, high_key, amount, key_0, tl.sum(sums_0, axis=0), wanted)
        low_key, high_key, amount = _narrowed(low_key, high_key, amount, key_1, tl.sum(sums_1, axis=0), wanted)
        low_key, high_key, amount = _narrowed(low_key, high_key, amount, key_2, tl.sum(sums_2, axis=0), wanted)
        low_key, high_key, amount = _narrowed(low_key, high_key, amount, key_3, tl.sum(sums_3, axis=0), wanted)
    return low_key


@triton.jit
def _between(x, low_key, high_key, SHIFT: tl.constexpr):
    """The key of `x`, or the nearest one between the two."""
    return tl.minimum(tl.maximum(order_keys(x, SHIFT), low_key + 1), high_key - 1)


@triton.jit
def _narrowed(low_key, high_key, amount, key, sum_at_key, wanted):
    is_enough = sum_at_key >= wanted
    amount = tl.where(is_enough & (key > low_key), sum_at_key, amount)
    low_key = tl.where(is_enough, tl.maximum(low_key, key), low_key)
    return low_key, tl.where(is_enough, high_key, tl.minimum(high_key, key)), amount


@triton.jit
def _gather(row, size, key, few, few_ids, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write together, in the order of ids, what has at least this key, up to a block. Gives how many there are."""
    num_found = 0
    for begin in range(0, size, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < size, other=float("-inf"))
        is_one = (order_keys(x.to(tl.float32), SHIFT) >= key) & (ids < size)
        num_here = tl.sum(is_one.to(tl.int32), axis=0)
        if num_here > 0:
            places = num_found + tl.cumsum(is_one.to(tl.int32), axis=0) - 1
            tl.store(few + places, x, mask=is_one & (places < BLOCK))
            tl.store(few_ids + places, ids, mask=is_one & (places < BLOCK))
        num_found += num_here
    # Other threads of the program read it.
    tl.debug_barrier()
    return num_found


@triton.jit
def _place_of_equal(row, size, key, number, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The place of the entry that is the `number`-th, from 1, of those with this key."""
    begin, num_seen, found = 0, 0, size
    while num_seen < number:
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        is_equal = ((order_keys(x, SHIFT) == key) & (ids < size)).to(tl.int32)
        num_equal = tl.sum(is_equal, axis=0)
        if num_seen + num_equal >= number:
            is_it = (tl.cumsum(is_equal, axis=0) == number - num_seen) & (is_equal > 0)
            found = tl.min(tl.where(is_it, ids, size), axis=0)
        num_seen += num_equal
        begin += BLOCK
    return found
