"""Blocks that sequences got, written into the block tables on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.sizes import ceil_div
from eventlm.kernels.gpu.tuned import tuned


def write_blocks(updates_U3: Tensor, num_updates: int, block_tables: Tensor) -> None:
    """`block_tables[slot, place] = block` for the first `num_updates` rows (slot, place, block) of `updates_U3`.

    updates_U3: int32 [capacity, 3], dense. block_tables: int32 [num_slots, max_blocks]. No slot and place may be given
    twice.
    """
    config = tuned("write_blocks")
    grid = (ceil_div(num_updates, config["BLOCK"]),)
    _write_blocks_kernel[grid](updates_U3, num_updates, block_tables, block_tables.stride(0), **config)


def write_blocks_reference(updates_U3: Tensor, num_updates: int, block_tables: Tensor) -> None:
    """The same in torch."""
    slots, places, blocks = updates_U3[:num_updates].unbind(1)
    block_tables[slots, places] = blocks


@triton.jit(do_not_specialize=["num_updates"])
def _write_blocks_kernel(updates, num_updates, block_tables, slot_stride, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_updates
    slots = tl.load(updates + rows * 3, mask=mask, other=0).to(tl.int64)
    places = tl.load(updates + rows * 3 + 1, mask=mask, other=0)
    blocks = tl.load(updates + rows * 3 + 2, mask=mask, other=0)
    tl.store(block_tables + slots * slot_stride + places, blocks, mask=mask)
