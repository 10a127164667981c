"""Penalties on the logits of tokens that a sequence has had: repetition (Keskar et al., 2019) on prompt and output,
frequency and presence (OpenAI) on the output.

The reference is the worker's in torch, `eventlm/worker/sampling/logits_processors.py`.

Shapes: S rows of logits, V vocabulary, R rows with penalties, N different tokens of the row that has most.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import ceil_div

_BLOCK = 256


def apply_penalties(logits_SV: Tensor, rows_R: Tensor, penalties_R3: Tensor, ids_RN: Tensor, counts_RN: Tensor) -> None:
    """Change the logits, of any floating dtype, in place.

    rows_R: which rows, int32, each once. penalties_R3: repetition, frequency, presence; float32. ids_RN: tokens that
    the row has had, int32, each once, padded with -1. counts_RN: how often the output had them, int32. Entries of a row
    lie side by side.
    """
    num_rows, num_ids = ids_RN.shape
    if not ids_RN.numel():
        return
    _apply_penalties[(num_rows, ceil_div(num_ids, _BLOCK))](
        logits_SV,
        logits_SV.stride(0),
        rows_R,
        rows_R.stride(0),
        penalties_R3,
        penalties_R3.stride(0),
        ids_RN,
        ids_RN.stride(0),
        counts_RN,
        counts_RN.stride(0),
        num_ids,
        BLOCK=_BLOCK,
        num_warps=4,
    )


# How many ids there are differs from step to step, and so do strides and alignment of what is packed with them: one
# code for all.
@triton.jit(
    do_not_specialize=["rows_stride", "penalties_stride", "ids_stride", "counts_stride", "num_ids"],
    do_not_specialize_on_alignment=["rows", "penalties", "ids", "counts"],
)
def _apply_penalties(
    logits,
    logits_stride,
    rows,
    rows_stride,
    penalties,
    penalties_stride,
    ids,
    ids_stride,
    counts,
    counts_stride,
    num_ids,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number * rows_stride).to(tl.int64)
    penalty = penalties + number * penalties_stride
    repetition, frequency, presence = tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_ids = tl.load(ids + number * ids_stride + places, mask=places < num_ids, other=-1)
    is_token = token_ids >= 0
    count = tl.load(counts + number * counts_stride + places, mask=is_token, other=0)
    at = logits + row * logits_stride + token_ids
    x = tl.load(at, mask=is_token, other=0.0).to(tl.float32)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    x -= frequency * count.to(tl.float32)
    x = tl.where(count > 0, x - presence, x)
    tl.store(at, x.to(logits.dtype.element_ty), mask=is_token)
