"""The embeddings of a step's tokens, of which some are what the step before has drawn and only the GPU knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import ceil_div, tuned


def embed_tokens(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor, out_TH: Tensor) -> None:
    """Rows of `embedding_VH` into `out_TH`, of the same dtype; T tokens, S slots, V words, H hidden size.

    staged_T: int32 [T], the token's number, or -slot - 1 where it is `last_tokens_S[slot]`, int32 [S]; negative ones of
    these count as 0. Rows may lie apart; the last dimension must be dense.
    """
    num_tokens, hidden_size = out_TH.shape
    config = tuned("embed_tokens")
    grid = (num_tokens, ceil_div(hidden_size, config["BLOCK"]))
    _embed_tokens_kernel[grid](
        staged_T, last_tokens_S, embedding_VH, out_TH, embedding_VH.stride(0), out_TH.stride(0), hidden_size, **config
    )


@triton.jit
def _embed_tokens_kernel(
    staged, last_tokens, embedding, out, embedding_stride, out_stride, H: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    number = tl.load(staged + token)
    if number < 0:
        number = tl.maximum(tl.load(last_tokens - number - 1), 0)
    row = tl.load(embedding + number.to(tl.int64) * embedding_stride + columns, mask=mask)
    tl.store(out + token * out_stride + columns, row, mask=mask)
