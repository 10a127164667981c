"""Draws of the compiled forward pass: the tokens that torch's operations draw with the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from eventlm.kernels.cpu.decoder import CpuDecoder, DrawRows
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.loader import load_cpu_decoder
from eventlm.worker.sampling.noise import hash_ids, negative_gumbel_noise, noise_keys
from eventlm.worker.sampling.sampler import NOT_FINITE
from tests.kernels.cpu.decoders import Shape, write_checkpoint

#: No multiple of the lanes, and more than one thread takes at a time.
VOCAB = 17_003


@pytest.fixture(params=available_builds() or [pytest.param("", marks=pytest.mark.skip(reason="nothing is compiled"))])
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decoder(tmp_path: Path, build: str) -> CpuDecoder:
    folder = write_checkpoint(tmp_path, Shape(vocab=VOCAB, hidden=16))
    return load_cpu_decoder(folder, build, max_positions=16, num_threads=2)


def rows_of(temperatures: Sequence[float]) -> DrawRows:
    """Rows of different sequences, at different places of their outputs."""
    indices = range(len(temperatures))
    return DrawRows(temperatures, [(number * 7919) << 40 for number in indices], indices)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_draws_are_those_of_the_same_noise_in_torch(decoder: CpuDecoder, spread: float) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * spread
    rows = rows_of(np.linspace(0.3, 2, 40).tolist())
    keys = noise_keys(np.array(rows.keys, dtype=np.uint64), np.array(rows.positions), torch.device("cpu"))
    noise = negative_gumbel_noise(keys, hash_ids(torch.arange(VOCAB, dtype=torch.int32)))
    scores = logits / torch.tensor(rows.temperatures)[:, None] - noise
    drawn = torch.tensor(decoder.draw(logits, rows))[:, None]
    # The logarithms differ in their last bits.
    assert (scores.amax(dim=-1, keepdim=True) - scores.gather(1, drawn)).max() < 1e-4
    assert (drawn[:, 0] == scores.argmax(dim=-1)).sum() >= 39


def test_the_first_of_the_largest_is_drawn_greedily(decoder: CpuDecoder) -> None:
    logits = torch.randint(-5, 5, (8, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    logits[0, VOCAB - 1] = 9.0
    logits[1, :] = -torch.inf
    logits[1, 12_345] = -3.0
    drawn = decoder.draw(logits, rows_of([0.0] * 8))
    assert drawn == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_what_is_masked_is_never_drawn(decoder: CpuDecoder) -> None:
    logits = torch.full((20, VOCAB), -torch.inf)
    logits[:, 16_990:] = 0.0
    drawn = decoder.draw(logits, rows_of([5.0] * 20))
    assert min(drawn) >= 16_990
    assert len(set(drawn)) > 5


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_rows_with_nan_or_infinity_draw_no_token(decoder: CpuDecoder, value: float) -> None:
    """All of a row, all but one, or one, at the vocabulary's ends. No row changes another's draw."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = rows_of(np.linspace(0, 2, 8).tolist())
    expected = decoder.draw(logits, rows)
    logits[:2] = value
    logits[2:4, 1:] = value
    logits[4:6, : VOCAB - 1] = value
    logits[6, VOCAB - 1] = value
    drawn = decoder.draw(logits, rows)
    assert drawn[7] == expected[7]
    if value == -torch.inf:
        # Only masks are minus infinity.
        assert drawn[2:6] == [0, 0, VOCAB - 1, VOCAB - 1]
        assert 0 <= min(drawn) <= max(drawn) < VOCAB
    else:
        assert drawn[:7] == [NOT_FINITE] * 7
    for row in range(8):
        alone = DrawRows(*([values[row]] for values in rows))
        assert decoder.draw(logits[row : row + 1], alone) == [drawn[row]]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9, 40, 100])
def test_a_draw_without_logits_is_that_of_the_logits(
    tmp_path: Path, build: str, num_rows: int, quantization: str
) -> None:
    """Greedy rows and others; a row of NaN draws no token."""
    folder = write_checkpoint(tmp_path, Shape(vocab=VOCAB, hidden=48))
    decoder = load_cpu_decoder(folder, build, quantization=quantization, max_positions=16, num_threads=2)
    hidden = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(num_rows))
    hidden[num_rows // 2, 5] = torch.nan if num_rows > 2 else 1.0
    rows = rows_of([0.0 if row % 3 == 0 else row * 0.1 for row in range(num_rows)])
    drawn = decoder.draw_next(hidden, rows)
    assert drawn == decoder.draw(decoder.logits(hidden), rows)
    assert len(set(drawn)) > num_rows * 0.9 - 1
    if num_rows > 2:
        assert drawn[num_rows // 2] == NOT_FINITE


@pytest.mark.parametrize("vocab", [33, 47, 49, 97])
def test_no_id_after_the_vocabulary_is_drawn_where_all_logits_are_negative(
    tmp_path: Path, build: str, vocab: int
) -> None:
    """Columns that fill the last panel give 0, which would be the best."""
    folder = write_checkpoint(tmp_path, Shape(vocab=vocab, hidden=16))
    decoder = load_cpu_decoder(folder, build, max_positions=16, num_threads=1)
    decoder.load("final_norm", 0, torch.ones(16))
    decoder.load("lm_head", 0, -0.01 - torch.rand(vocab, 16, generator=torch.Generator().manual_seed(vocab)))
    hidden = torch.rand(200, 16, generator=torch.Generator().manual_seed(1)) + 0.1
    rows = rows_of([0.0, 1.0] * 100)
    assert decoder.logits(hidden).max() < 0
    drawn = decoder.draw_next(hidden, rows)
    assert max(drawn) < vocab
    assert drawn == decoder.draw(decoder.logits(hidden), rows)


def test_equal_logits_draw_the_first_id_and_no_rows_draw_nothing(tmp_path: Path, build: str) -> None:
    folder = write_checkpoint(tmp_path, Shape(vocab=VOCAB, hidden=16))
    decoder = load_cpu_decoder(folder, build, max_positions=16, num_threads=2)
    assert decoder.draw_next(torch.zeros(3, 16), rows_of([0.0] * 3)) == [0, 0, 0]
    assert decoder.draw_next(torch.zeros(0, 16), rows_of([])) == []
    assert decoder.draw(torch.zeros(0, VOCAB), rows_of([])) == []
