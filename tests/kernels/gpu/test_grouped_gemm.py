from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.references import grouped_gemm_reference
from eventlm.kernels.gpu.grouped_gemm import grouped_gemm, most_tiles

CONFIG = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2, "num_warps": 4, "num_stages": 2}


def inputs(
    rows_E: list[int], N: int, K: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((sum(rows_E), K), generator=generator)
    weight = torch.randn((len(rows_E), N, K), generator=generator)
    offsets = torch.tensor([0, *itertools.accumulate(rows_E)], dtype=torch.int32)
    return x.to(device, dtype), weight.to(device, dtype), offsets.to(device)


@pytest.mark.parametrize(
    ("rows_E", "N", "K"),
    [
        ([1], 32, 32),
        ([5, 0, 17, 16], 33, 65),
        ([0, 0, 40, 0, 1], 70, 31),
        ([0, 33, 0], 5, 100),
        ([1] * 11, 16, 24),
        ([16, 32, 0, 48], 64, 64),
    ],
)
def test_against_the_reference(rows_E: list[int], N: int, K: int, device: torch.device) -> None:
    x, weight, offsets = inputs(rows_E, N, K, device)
    exact = grouped_gemm_reference(x.double(), weight.double(), offsets, max_rows=max(rows_E))
    for max_rows in (max(rows_E), sum(rows_E)):
        out = torch.full((sum(rows_E), N), torch.nan, device=device)
        assert grouped_gemm(x, weight, offsets, max_rows=max_rows, out_TN=out, config=CONFIG) is out
        torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_E", [[3, 0, 20], [150, 0, 40], [0, 0, 0]])
def test_the_stored_configurations(dtype: torch.dtype, rows_E: list[int], device: torch.device) -> None:
    x, weight, offsets = inputs(rows_E, 130, 96, device, dtype)
    exact = grouped_gemm_reference(x.double(), weight.double(), offsets, max_rows=max(rows_E))
    out = grouped_gemm(x, weight, offsets, max_rows=max(rows_E))
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * 10 * exact.norm()


def test_rows_of_no_expert_are_left_alone(device: torch.device) -> None:
    """As the padding of a step that is captured for more tokens."""
    x, weight, _ = inputs([20, 30], 40, 64, device)
    offsets = torch.tensor([2, 19, 35], dtype=torch.int32, device=device)
    out = torch.full((50, 48), torch.nan, device=device)
    grouped_gemm(x, weight, offsets, max_rows=50, out_TN=out[:, 8:], config=CONFIG)
    exact = grouped_gemm_reference(x, weight, offsets, max_rows=50, out_TN=torch.full_like(out, torch.nan)[:, 8:])
    torch.testing.assert_close(out[:, 8:], exact, atol=1e-4, rtol=1e-5, equal_nan=True)
    assert out[:, :8].isnan().all()
    assert out[:2].isnan().all()
    assert out[35:].isnan().all()


def test_weights_lie_apart(device: torch.device) -> None:
    x, weight, offsets = inputs([9, 18], 48, 80, device)
    part = weight[:, 8:40, :64]
    exact = grouped_gemm_reference(x[:, 16:], part, offsets, max_rows=18)
    out = grouped_gemm(x[:, 16:], part, offsets, max_rows=18, config=CONFIG)
    torch.testing.assert_close(out, exact, atol=1e-4, rtol=1e-5)


def test_the_grid_has_room_for_every_split_of_the_rows() -> None:
    for T, E, block in itertools.product(range(12), range(1, 5), (2, 3)):
        for rows_E in itertools.product(range(T + 1), repeat=E):
            if sum(rows_E) == T:
                needed = sum(-(-rows // block) for rows in rows_E)
                assert needed <= most_tiles(T, E, max(rows_E), block)
