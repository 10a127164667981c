from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.matmul import matmul

CONFIG = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2, "num_warps": 4, "num_stages": 2, "programs": 1}


def randn(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize(("T", "N", "K"), [(1, 1, 1), (7, 33, 65), (16, 32, 32), (70, 100, 200), (83, 5, 129)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_against_float64(T: int, N: int, K: int, has_bias: bool, device: torch.device) -> None:
    x, weight = randn(device, T, K), randn(device, N, K, seed=1)
    bias = randn(device, N, seed=2) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    out = matmul(x, weight, bias, config=CONFIG)
    assert out.shape == (T, N)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stored_configuration(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = randn(device, 130, 96, dtype=dtype), randn(device, 140, 96, seed=1, dtype=dtype)
    bias = randn(device, 140, seed=2, dtype=dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    out = matmul(x, weight, bias)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * 10 * exact.norm()
    assert torch.equal(matmul(x[64:65], weight, bias), out[64:65])
    assert matmul(x[:0], weight).shape == (0, 140)


def test_rows_lie_apart(device: torch.device) -> None:
    x, weight = randn(device, 20, 90)[:, 8:72], randn(device, 33, 80)[:, :64]
    out = torch.full((20, 50), torch.nan, device=device)
    assert matmul(x, weight, out_TN=out[:, 10:43], config=CONFIG).data_ptr() == out[:, 10:].data_ptr()
    torch.testing.assert_close(out[:, 10:43], x @ weight.T, atol=1e-4, rtol=1e-5)
    assert out[:, :10].isnan().all()
    assert out[:, 43:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [64, 75])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, K: int, device: torch.device) -> None:
    """Alone, anywhere in a tile, in any tile, and beside rows that are not numbers."""
    x, weight = randn(device, 67, K, dtype=dtype), randn(device, 50, K, seed=1, dtype=dtype)
    alone = torch.cat([matmul(row, weight, config=CONFIG) for row in x.split(1)])
    assert torch.equal(matmul(x, weight, config=CONFIG), alone)
    for first in (1, 16, 30, 66):
        assert torch.equal(matmul(x[first:], weight, config=CONFIG), alone[first:])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(3)).to(device)
    assert torch.equal(matmul(x[order], weight, config=CONFIG), alone[order])
    x[5] = torch.inf
    x[20] = torch.nan
    kept = [row for row in range(67) if row not in (5, 20)]
    assert torch.equal(matmul(x, weight, config=CONFIG)[kept], alone[kept])
