"""Draws of the compiled forward pass: the tokens that torch's operations draw with the same noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eventlm.kernels.cpu.decoder import CpuDecoder
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.loader import load_cpu_decoder
from eventlm.worker.noise import hash_ids, negative_gumbel_noise, noise_keys
from tests.kernels.cpu.decoders import Shape, write_checkpoint

#: No multiple of the lanes, and more than one thread takes at a time.
VOCAB = 17_003


@pytest.fixture(params=available_builds() or [pytest.param("", marks=pytest.mark.skip(reason="nothing is compiled"))])
def decoder(tmp_path: Path, request: pytest.FixtureRequest) -> CpuDecoder:
    folder = write_checkpoint(tmp_path, Shape(vocab=VOCAB, hidden=16))
    return load_cpu_decoder(folder, request.param, max_positions=16, num_threads=2)


def keys_of(num_rows: int) -> Tensor:
    return noise_keys(np.arange(num_rows, dtype=np.uint64) * 7919, np.arange(num_rows), torch.device("cpu"))


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_draws_are_those_of_the_same_noise_in_torch(decoder: CpuDecoder, spread: float) -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * spread
    temperatures, keys = np.linspace(0.3, 2, 40, dtype=np.float32), keys_of(40)
    noise = negative_gumbel_noise(keys, hash_ids(torch.arange(VOCAB, dtype=torch.int32)))
    scores = logits / torch.from_numpy(temperatures)[:, None] - noise
    drawn = decoder.draw(logits, temperatures, keys).long()[:, None]
    # The logarithms differ in their last bits.
    assert (scores.amax(dim=-1, keepdim=True) - scores.gather(1, drawn)).max() < 1e-4
    assert (drawn[:, 0] == scores.argmax(dim=-1)).sum() >= 39


def test_the_first_of_the_largest_is_drawn_greedily(decoder: CpuDecoder) -> None:
    logits = torch.randint(-5, 5, (8, VOCAB), generator=torch.Generator().manual_seed(1)).float()
    logits[0, VOCAB - 1] = 9.0
    logits[1, :] = -torch.inf
    logits[1, 12_345] = -3.0
    drawn = decoder.draw(logits, np.zeros(8), keys_of(8))
    assert drawn.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_what_is_masked_is_never_drawn(decoder: CpuDecoder) -> None:
    logits = torch.full((20, VOCAB), -torch.inf)
    logits[:, 16_990:] = 0.0
    drawn = decoder.draw(logits, np.full(20, 5.0), keys_of(20))
    assert drawn.min() >= 16_990
    assert len(set(drawn.tolist())) > 5


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_logits_that_are_no_numbers_draw_an_id_of_the_vocabulary(decoder: CpuDecoder, value: float) -> None:
    """All of them, all but one, or one, at the vocabulary's ends; and no row changes another's draw."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3))
    expected = decoder.draw(logits, np.linspace(0, 2, 8), keys_of(8))
    logits[:2] = value
    logits[2:4, 1:] = value
    logits[4:6, : VOCAB - 1] = value
    logits[6, VOCAB - 1] = value
    drawn = decoder.draw(logits, np.linspace(0, 2, 8), keys_of(8))
    assert drawn.min() >= 0
    assert drawn.max() < VOCAB
    assert drawn[7] == expected[7]
    if value != torch.inf:
        assert drawn[2:6].tolist() == [0, 0, VOCAB - 1, VOCAB - 1]
    for row in range(8):
        assert decoder.draw(logits[row : row + 1], np.array([row * 2 / 7]), keys_of(8)[row : row + 1]) == drawn[row]
