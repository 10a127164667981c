"""The embeddings of a step's tokens, of which some are what the step before has drawn and only the GPU knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.sizes import ceil_div
from eventlm.kernels.gpu.tuned import tuned


def embed_tokens(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor, out_TH: Tensor) -> None:
    """Rows of `embedding_VH` into `out_TH`, of the same dtype; T tokens, S slots, V words, H hidden size.

    staged_T: int32 [T], the token's number, or -slot - 1 where it is `last_tokens_S[slot]`, int32 [S]. Rows may lie
    apart; the last dimension must be dense.
    """
    num_tokens, hidden_size = out_TH.shape
    config = tuned("embed_tokens")
    grid = (num_tokens, ceil_div(hidden_size, config["BLOCK"]))
    _embed_tokens_kernel[grid](
        staged_T, last_tokens_S, embedding_VH, out_TH, embedding_VH.stride(0), out_TH.stride(0), hidden_size, **config
    )


def embed_tokens_reference(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor, out_TH: Tensor) -> None:
    """The same in torch."""
    token_ids_T = staged_T.clone()
    from_slots = staged_T < 0
    token_ids_T[from_slots] = last_tokens_S[-staged_T[from_slots] - 1]
    out_TH.copy_(embedding_VH[token_ids_T])


@triton.jit
def _embed_tokens_kernel(
    staged, last_tokens, embedding, out, embedding_stride, out_stride, H: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    number = tl.load(staged + token)
    if number < 0:
        number = tl.load(last_tokens - number - 1)
    row = tl.load(embedding + number.to(tl.int64) * embedding_stride + columns, mask=mask)
    tl.store(out + token * out_stride + columns, row, mask=mask)
