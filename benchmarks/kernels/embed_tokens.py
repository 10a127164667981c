"""Embeddings of a step's tokens: bytes are those of each row once in and once out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import embed_tokens_reference
from eventlm.kernels.gpu.embed_tokens import embed_tokens


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Decodes, whose tokens the step before has drawn, and prefills."""
    vocab_size, hidden_size = (50, 96) if smoke else (151_936, 4096)
    embedding = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device=device).normal_()
    last_tokens = torch.randint(vocab_size, (256,), dtype=torch.int32, device=device)
    for num_tokens in (3,) if smoke else (1, 256, 8192):
        token_ids = torch.randint(vocab_size, (num_tokens,), dtype=torch.int32, device=device)
        slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
        staged = token_ids if num_tokens > len(last_tokens) else -slots - 1
        yield KernelCase(
            name=f"embed_tokens T={num_tokens}",
            run=partial(_run, staged, last_tokens, embedding),
            reference=partial(_reference, staged, last_tokens, embedding),
            num_bytes=2 * num_tokens * hidden_size * embedding.itemsize,
            tolerance=0.0,
            peer=partial(torch.nn.functional.embedding, token_ids, embedding),
            peer_name="torch, of known tokens",
            target=0.7 if num_tokens == 8192 else 0.0,
        )


def _run(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor) -> Tensor:
    out = embedding_VH.new_empty(len(staged_T), embedding_VH.shape[1])
    embed_tokens(staged_T, last_tokens_S, embedding_VH, out)
    return out


def _reference(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor) -> Tensor:
    out = embedding_VH.new_empty(len(staged_T), embedding_VH.shape[1])
    embed_tokens_reference(staged_T, last_tokens_S, embedding_VH, out)
    return out
