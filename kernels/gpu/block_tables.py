"""The block tables of sequences, which stay on the GPU: writes blocks into them, and looks up slots of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import ceil_div, tuned

_BLOCK_T = 128


def cache_slots(token_slots_T: Tensor, positions_T: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """Block x block_size + place of each token, int64 [T]; -1 where its slot is -1.

    token_slots_T: int32, the row of its sequence in `block_tables` int32 [num_slots, max_blocks]. positions_T: int32.
    """
    num_tokens = len(token_slots_T)
    slots_T = torch.empty(num_tokens, dtype=torch.int64, device=token_slots_T.device)
    if num_tokens:
        _cache_slots[(ceil_div(num_tokens, _BLOCK_T),)](
            token_slots_T,
            positions_T,
            block_tables,
            slots_T,
            num_tokens,
            block_tables.stride(0),
            block_size,
            BLOCK_T=_BLOCK_T,
        )
    return slots_T


@triton.jit(do_not_specialize=["num_tokens"])
def _cache_slots(
    token_slots, positions, block_tables, slots, num_tokens, table_stride, block_size, BLOCK_T: tl.constexpr
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    sequence = tl.load(token_slots + token, mask=is_token, other=-1)
    position = tl.load(positions + token, mask=is_token, other=0)
    is_real = sequence >= 0
    place = sequence.to(tl.int64) * table_stride + position // block_size
    block = tl.load(block_tables + place, mask=is_real, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(slots + token, tl.where(is_real, slot, -1), mask=is_token)


def write_blocks(updates_U3: Tensor, num_updates: int, block_tables: Tensor) -> None:
    """`block_tables[slot, place] = block` for the first `num_updates` rows (slot, place, block) of `updates_U3`.

    updates_U3: int32 [capacity, 3], dense. block_tables: int32 [num_slots, max_blocks]. No slot and place may be given
    twice.
    """
    config = tuned("write_blocks")
    grid = (ceil_div(num_updates, config["BLOCK"]),)
    _write_blocks_kernel[grid](updates_U3, num_updates, block_tables, block_tables.stride(0), **config)


@triton.jit(do_not_specialize=["num_updates"])
def _write_blocks_kernel(updates, num_updates, block_tables, slot_stride, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_updates
    slots = tl.load(updates + rows * 3, mask=mask, other=0).to(tl.int64)
    places = tl.load(updates + rows * 3 + 1, mask=mask, other=0)
    blocks = tl.load(updates + rows * 3 + 2, mask=mask, other=0)
    tl.store(block_tables + slots * slot_stride + places, blocks, mask=mask)
