"""Sequences to sample for, and draws of their next tokens, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eventlm.sampling_params import SamplingParams
from eventlm.worker.sampling.sampler import Sampler
from eventlm.worker.sequence_table import WorkerSequence
from tests.worker.launches import new_sequence


def sequence(
    number: int = 0,
    *,
    seed: int = 0,
    index: int = 0,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    **params: Any,
) -> WorkerSequence:
    """Request `number`'s sequence with this history."""
    return WorkerSequence(
        new_sequence(
            number,
            [*prompt, *output],
            index=index,
            num_prompt_tokens=len(prompt),
            params=SamplingParams(seed=seed, **params),
        )
    )


def make_sampler(vocab_size: int, sequences: Sequence[WorkerSequence] = ()) -> Sampler:
    """A sampler that has these sequences in its table."""
    sampler = Sampler(vocab_size, torch.device("cpu"))
    for each in sequences:
        sampler.table.add(each)
    return sampler


def draw(logits: torch.Tensor, sequences: Sequence[WorkerSequence]) -> list[int]:
    """One token for each of different sequences, by a sampler made for this."""
    tokens: list[int] = make_sampler(logits.shape[1], sequences).sample(logits, sequences).tolist()
    return tokens


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Logits spread like a model's."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
