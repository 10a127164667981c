"""Draws of kernels are those of the worker's sampler in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.draw_tokens import (
    DRAW_COLUMNS,
    draw_tokens,
    negative_gumbel_noise,
    number_of,
    order_keys,
    shift_of,
)
from eventlm.worker.sampling import noise

TEMPERATURES = (0.0, 1.0, 0.7, 30.0, 1e-5)


def pack_draws(temperatures_S: Tensor, seed: int = 0) -> Tensor:
    """Draws without masks under random keys."""
    draws = torch.zeros(len(temperatures_S), len(DRAW_COLUMNS), dtype=torch.int32)
    draws[:, 0] = temperatures_S.view(torch.int32)
    draws[:, 1:3] = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, (len(draws), 2)))
    return draws


def drawn(logits: Tensor, draws: Tensor, device: torch.device, limits: Tensor | None = None) -> Tensor:
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=device)
    limits = None if limits is None else limits.to(device)
    draw_tokens(logits.to(device), draws.to(device), out, limits_S2=limits)
    return out.cpu()


def expected(logits: Tensor, draws: Tensor) -> Tensor:
    temperatures = draws[:, :1].view(torch.float32)
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    scores = logits / temperatures.where(temperatures > 0, 1)
    scores -= noise.negative_gumbel_noise(draws[:, 1:3], noise.hash_ids(ids)) * (temperatures > 0)
    return scores.argmax(dim=-1).to(torch.int32)


@triton.jit
def _noise(keys, out, N: tl.constexpr):
    ids = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + ids, negative_gumbel_noise(ids, tl.load(keys), tl.load(keys + 1)))


def test_noise_is_torchs(device: torch.device) -> None:
    out = torch.empty(1 << 18, device=device)
    keys = torch.tensor([[0x12345678, -0x76543210]], dtype=torch.int32)
    _noise[(64,)](keys.to(device), out, 1 << 12)
    ids = noise.hash_ids(torch.arange(1 << 18, dtype=torch.int32))
    assert torch.allclose(out.cpu(), noise.negative_gumbel_noise(keys, ids)[0], rtol=0, atol=2e-6)


@triton.jit
def _orders(x, keys, back, N: tl.constexpr, SHIFT: tl.constexpr):
    indices = tl.arange(0, N)
    key = order_keys(tl.load(x + indices).to(tl.float32), SHIFT)
    tl.store(keys + indices, key)
    tl.store(back + indices, number_of(key, SHIFT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_in_the_order_of_the_numbers(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 100
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 6e4, -6e4, 1e-7, -1e-7])
    x = x.to(dtype).sort().values
    keys, back = torch.empty(1024, dtype=torch.int32, device=device), torch.empty(1024, device=device)
    _orders[(1,)](x.to(device), keys, back, 1024, shift_of(dtype))
    assert torch.equal(back.cpu(), x.float())
    assert torch.equal(keys.cpu().diff() > 0, x.float().diff() > 0)
    assert (keys.cpu().diff() >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 1000, 3003])
def test_greedy_and_free_rows_in_one_launch(dtype: torch.dtype, vocab_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 3 * len(TEMPERATURES)
    # Rows of a wider tensor: they have a stride.
    logits = (torch.randn(num_rows, vocab_size + 3, generator=generator) * 3).to(dtype)[:, :vocab_size]
    logits[0] = -torch.inf
    logits[1, 2:] = -torch.inf
    logits[5] = logits[5].round()
    draws = pack_draws(torch.tensor(TEMPERATURES).repeat(3))
    assert torch.equal(drawn(logits, draws, device), expected(logits, draws))


def test_rows_that_are_split_and_rows_that_are_not_draw_alike(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(1, 9000, generator=torch.Generator().manual_seed(0)).expand(8, -1)
    draws = pack_draws(torch.ones(8))
    split = drawn(logits, draws, device)
    monkeypatch.setattr("eventlm.kernels.gpu.draw_tokens._NUM_PROGRAMS", 1)
    assert torch.equal(split, expected(logits, draws))
    assert torch.equal(split, drawn(logits, draws, device))


def test_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[0, ::2] = -0.0
    logits[1, 4000:] = 1.0
    logits[2, 17] = logits[2, 4999] = 2.0
    assert drawn(logits, pack_draws(torch.zeros(3)), device).tolist() == [0, 4000, 17]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nan_or_infinity_have_no_token(temperature: float, dtype: torch.dtype, device: torch.device) -> None:
    """Wherever it is in the row. Minus infinity is a score like others, if not the only one of a row."""
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(0))
    draws = pack_draws(torch.full((9,), temperature))
    logits[7, 5:] = -torch.inf
    whole = drawn(logits.to(dtype), draws, device).tolist()
    for row, (index, value) in enumerate(
        [(0, torch.nan), (2999, -torch.nan), (1500, torch.inf), (slice(None), torch.nan), (slice(None), torch.inf)]
    ):
        logits[row, index] = value
    assert drawn(logits.to(dtype), draws, device).tolist() == [-1] * 5 + whole[5:]
    assert min(whole) >= 0


def test_no_rows(device: torch.device) -> None:
    assert drawn(torch.empty(0, 50), pack_draws(torch.empty(0)), device).tolist() == []


def test_limits(device: torch.device) -> None:
    logits = torch.tensor([[3.0, -1.0, 2.0, 2.0, 2.0, 9.0]]).expand(50, -1).bfloat16()
    limits = torch.tensor([[torch.tensor(2.0).view(torch.int32) >> 16, 3]], dtype=torch.int32).expand(50, -1)
    draws = pack_draws(torch.full((50,), 100.0))
    found, free = drawn(logits, draws, device, limits.contiguous()), expected(logits, draws)
    assert set(found.tolist()) == {0, 2, 3, 5}
    assert ((found == free) | (free == 1) | (free == 4)).all()
