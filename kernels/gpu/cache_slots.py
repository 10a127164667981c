"""Where the keys and values of a step's tokens go, by the block tables on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.sizes import ceil_div

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


def cache_slots_reference(token_slots_T: Tensor, positions_T: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    """The same in torch's operations."""
    positions = positions_T.long()
    blocks = block_tables.long()[token_slots_T.clamp(min=0).long(), positions // block_size]
    return torch.where(token_slots_T >= 0, blocks * block_size + positions % block_size, -1)


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
