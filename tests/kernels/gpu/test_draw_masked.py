"""What masks leave of rows, and draws from that, are what the worker's sampler in torch leaves and draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.draw_masked import draw_masked, mask_limits
from eventlm.worker.gpu.sampler import GpuSampler
from eventlm.worker.sampling.candidates import mask_candidates
from eventlm.worker.sampling.sampling_table import MASKED
from eventlm.worker.sequence_table import WorkerSequence
from tests.worker.draws import draw, make_sampler, sequence

NUM_ROWS = 16


def random_rows(rng: random.Random, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Rows with ties, without any, with entries that cannot be drawn, and of small numbers."""
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * rng.choice([1, 3, 8])
    logits[::5] = logits[::5].round()
    logits[1::5, ::3] = -torch.inf
    logits[2::5] *= 1e-3
    logits[3::10] = 0.5
    return logits.to(dtype)


def random_sequences(rng: random.Random, vocab_size: int) -> list[WorkerSequence]:
    """With every combination of masks, and of a few temperatures."""
    sequences = []
    for number in range(NUM_ROWS):
        params: dict[str, Any] = {"seed": number, "temperature": rng.choice([0.0, 0.1, 0.8, 1.0, 2.0])}
        if number & 1:
            params["top_p"] = rng.choice([0.01, 0.31, 0.9, 0.999])
        if number & 2:
            params["top_k"] = rng.choice([1, 2, 5, vocab_size // 2, vocab_size - 1, vocab_size + 1])
        if number & 4:
            params["min_p"] = rng.choice([0.001, 0.05, 0.9, 1.0])
        sequences.append(sequence(number, **params))
    return sequences


def stage(sequences: list[WorkerSequence], vocab_size: int, device: torch.device) -> Tensor:
    sampler = GpuSampler(vocab_size, device)
    for each in sequences:
        sampler.table.add(each)
    return torch.from_numpy(sampler.stage(sequences).draws).to(device)


def left(logits: Tensor, sequences: list[WorkerSequence], device: torch.device) -> Tensor:
    """Which entries are above the limits, booleans [S, V]."""
    limits = torch.empty((len(logits), 2), dtype=torch.int32, device=device)
    mask_limits(logits.to(device), stage(sequences, logits.shape[1], device), limits)
    keys, ids = limits.cpu().split(1, dim=1)
    shift = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[logits.dtype]
    bits = (logits.float() + 0.0).view(torch.int32)
    found = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift
    return (found > keys) | ((found == keys) & (torch.arange(logits.shape[1]) <= ids))


def left_by_torch(logits: Tensor, sequences: list[WorkerSequence], *, more: float = 0.0) -> Tensor:
    """The same, with so much added to top_p."""
    vocab_size = logits.shape[1]
    params = make_sampler(vocab_size, sequences).table.rows(sequences).params
    params["top_p"] += more
    masked = np.flatnonzero(params["needs"] & MASKED)
    candidates = mask_candidates(logits[masked], params[masked], vocab_size)
    expected = torch.ones(logits.shape, dtype=torch.bool)
    expected[masked] = expected[masked].scatter(1, candidates.ids, candidates.scores > -torch.inf)
    return expected


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "block"),
    [
        (torch.float32, 300, 64),
        (torch.bfloat16, 300, 512),
        (torch.bfloat16, 300, 64),
        (torch.bfloat16, 5, 8),
        (torch.float16, 100, 64),
    ],
)
def test_masks_and_draws_are_torchs(
    dtype: torch.dtype, vocab_size: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventlm.kernels.gpu.draw_masked.tuned", lambda op: {"BLOCK": block, "num_warps": 4})
    rng = random.Random(vocab_size)
    logits, sequences = random_rows(rng, vocab_size, dtype), random_sequences(rng, vocab_size)
    may = logits > -torch.inf
    found = left(logits, sequences, device) & may
    # Where the nucleus ends within rounding of an entry's end, either is right.
    expected = [left_by_torch(logits, sequences, more=more) & may for more in (0.0, 5e-6, -5e-6)]
    same = [(found == each).all(dim=1) for each in expected]
    assert torch.stack(same).any(dim=0).all()
    assert same[0].sum() > 0.8 * NUM_ROWS
    out = torch.empty(NUM_ROWS, dtype=torch.int32, device=device)
    draw_masked(logits.to(device), stage(sequences, vocab_size, device), out)
    drawn = torch.tensor(draw(logits, sequences), dtype=torch.int32)
    assert torch.equal(out.cpu()[same[0]], drawn[same[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_several_blocks(dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(4, 9001, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)
    logits[3] = 1.0
    params = [{"top_k": 40, "top_p": 0.5}, {"top_p": 0.95}, {"min_p": 0.1}, {"top_k": 8500}]
    sequences = [sequence(number, **each) for number, each in enumerate(params)]
    assert torch.equal(left(logits, sequences, device), left_by_torch(logits, sequences))


def test_of_equals_the_lowest_ids_are_left(device: torch.device) -> None:
    logits = torch.tensor([1.0, 2.0, -0.0, 2.0, 0.0, 2.0, 0.0, -torch.inf]).expand(4, -1)
    params = [{"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 1e-9}]
    sequences = [sequence(number, **each) for number, each in enumerate(params)]
    indices = [row.nonzero().flatten().tolist() for row in left(logits, sequences, device)]
    assert indices == [[1, 3], [0, 1, 2, 3, 5], [1, 3], [1]]


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 1e-5, "top_p": 0.5}])
def test_extreme_values(params: dict[str, Any], device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1e30, -torch.inf, 5.0], [-torch.inf, -torch.inf, 3.0, -torch.inf]])
    sequences = [sequence(number, seed=number, **params) for number in range(2)]
    out = torch.empty(2, dtype=torch.int32, device=device)
    draw_masked(logits.to(device), stage(sequences, 4, device), out)
    assert out.tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("value", "token"), [(-torch.inf, 0), (torch.nan, -1), (torch.inf, -1)])
def test_a_row_without_finite_logits_ends(value: float, token: int, device: torch.device) -> None:
    sequences = [sequence(0, top_k=2, top_p=0.5, min_p=0.1)]
    out = torch.empty(1, dtype=torch.int32, device=device)
    draw_masked(torch.full((1, 40), value, device=device), stage(sequences, 40, device), out)
    assert out.tolist() == [token]


def test_no_rows(device: torch.device) -> None:
    draw_masked(
        torch.empty(0, 50, device=device), stage([], 50, device), torch.empty(0, dtype=torch.int32, device=device)
    )
