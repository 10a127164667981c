"""Draws from logits: bytes are those of reading the logits once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from eventlm.kernels.gpu.draw_tokens import DRAW_COLUMNS, draw_tokens
from eventlm.worker.noise import hash_ids, negative_gumbel_noise

VOCAB_SIZE = 151_936


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Batches that draw greedily and at temperature 0.8 from the whole vocabulary."""
    vocab_size = 3000 if smoke else VOCAB_SIZE
    for num_rows in (2,) if smoke else (1, 64, 256):
        logits = make_logits(num_rows, vocab_size, device)
        for name, temperature in (("greedy", 0.0), ("free", 0.8)):
            draws = make_draws(num_rows, temperature, device)
            yield KernelCase(
                name=f"draw_tokens {name} S={num_rows}",
                run=partial(run_draw, logits, draws),
                reference=partial(reference_draw, logits, draws),
                num_bytes=logits.nbytes,
                tolerance=0.0,
                peer=partial(torch.argmax, logits, dim=-1)
                if not temperature
                else partial(torch_draw, logits, temperature),
                peer_name="torch.argmax" if not temperature else "torch softmax, exponential_, argmax",
                target=0.5 if not temperature else 0.0,
            )


def make_logits(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Random, bfloat16 [num_rows, vocab_size]: a bulk, and 20 likely tokens a row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    likely = torch.randint(vocab_size, (num_rows, 20), generator=generator)
    return logits.scatter_(1, likely, torch.rand(num_rows, 20, generator=generator) * 8 + 12).bfloat16().to(device)


def make_draws(num_rows: int, temperature: float, device: torch.device) -> Tensor:
    """Without masks; see `draw_tokens.DRAW_COLUMNS`."""
    draws = torch.zeros(num_rows, len(DRAW_COLUMNS), dtype=torch.int32)
    draws[:, 0] = torch.tensor(temperature).view(torch.int32)
    draws[:, 1:3] = torch.randint(-(2**31), 2**31, (num_rows, 2), generator=torch.Generator().manual_seed(1))
    return draws.to(device)


def run_draw(logits_SV: Tensor, draws_S6: Tensor) -> Tensor:
    """Token ids, int32 [S]."""
    out = torch.empty(len(logits_SV), dtype=torch.int32, device=logits_SV.device)
    draw_tokens(logits_SV, draws_S6, out)
    return out


def reference_draw(logits_SV: Tensor, draws_S6: Tensor) -> Tensor:
    """The same as the worker's sampler in torch draws them."""
    temperatures = draws_S6[:, :1].contiguous().view(torch.float32)
    ids = torch.arange(logits_SV.shape[1], dtype=torch.int32, device=logits_SV.device)
    noise = negative_gumbel_noise(draws_S6[:, 1:3], hash_ids(ids))
    return (logits_SV / temperatures.where(temperatures > 0, 1) - noise * (temperatures > 0)).argmax(dim=-1)


def torch_draw(logits_SV: Tensor, temperature: float) -> Tensor:
    """As it is usually written, of random numbers that depend on the batch."""
    probabilities = (logits_SV.float() / temperature).softmax(dim=-1)
    return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(dim=-1)
