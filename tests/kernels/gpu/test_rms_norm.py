from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eventlm.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from tests.kernels.gpu.tensors import DTYPES, assert_rounded_alike, random, rows_apart

_EPS = 1e-5
_SHAPES = [(1, 64), (3, 576), (2, 1024), (5, 33), (1, 5120), (33, 80)]


def _norm_of_transformers(x: Tensor, weight: Tensor) -> Tensor:
    norm = LlamaRMSNorm(len(weight), _EPS)
    norm.weight = torch.nn.Parameter(weight)
    out: Tensor = norm(x).detach()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_norm_is_transformers(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random(shape, dtype, device) * 4, random(shape[1:], dtype, device, seed=1)
    assert_rounded_alike(rms_norm(x, weight, _EPS), _norm_of_transformers(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", _SHAPES)
def test_norm_after_a_sum_is_transformers(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x, residual = random(shape, dtype, device), random(shape, dtype, device, seed=1) * 8
    weight = random(shape[1:], dtype, device, seed=2)
    total = residual + x
    expected = _norm_of_transformers(total, weight)
    add_rms_norm(x, residual, weight, _EPS)
    assert torch.equal(residual, total)
    assert_rounded_alike(x, expected)


def test_nothing_beside_the_rows_is_read_or_written(device: torch.device) -> None:
    x, residual, out = (rows_apart((5, 48), torch.bfloat16, device, seed=seed) for seed in range(3))
    weight = random((48,), torch.bfloat16, device)
    total = residual.rows + x.rows
    rms_norm(x.rows, weight, _EPS, out.rows)
    assert_rounded_alike(out.rows, _norm_of_transformers(x.rows, weight))
    add_rms_norm(x.rows, residual.rows, weight, _EPS)
    assert_rounded_alike(x.rows, _norm_of_transformers(total, weight))
    assert all(tensor.rest_is_nan() for tensor in (x, residual, out))


def test_a_norm_may_overwrite_its_input(device: torch.device) -> None:
    x, weight = random((3, 100), torch.float32, device), random((100,), torch.float32, device, seed=1)
    expected = _norm_of_transformers(x, weight)
    assert rms_norm(x, weight, _EPS, x) is x
    assert_rounded_alike(x, expected)


def test_zeros_stay_zeros_and_a_nan_stays_in_its_row(device: torch.device) -> None:
    x = torch.zeros(3, 24, device=device)
    x[1, 5] = torch.nan
    out = rms_norm(x, torch.ones(24, device=device), 1e-6)
    assert not out[0].any()
    assert not out[2].any()
    assert out[1].isnan().all()
