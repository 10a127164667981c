from __future__ import annotations

import pytest
import torch

from eventlm.kernels import silu_mul as torch_silu_mul
from eventlm.kernels.gpu.silu_mul import silu_mul
from tests.kernels.gpu.tensors import DTYPES, assert_rounded_alike, random, rows_apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (2, 1536), (33, 24), (7, 1025), (1, 33)])
def test_against_torch(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = random((num_tokens, 2 * size), dtype, device) * 4
    assert_rounded_alike(silu_mul(gate_up), torch_silu_mul.silu_mul(gate_up))


def test_nothing_beside_the_rows_is_read_or_written(device: torch.device) -> None:
    gate_up, out = rows_apart((5, 96), torch.bfloat16, device), rows_apart((5, 48), torch.bfloat16, device)
    silu_mul(gate_up.rows, out.rows)
    assert_rounded_alike(out.rows, torch_silu_mul.silu_mul(gate_up.rows))
    assert out.rest_is_nan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates_neither_overflow_nor_become_nan(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.tensor([[-6e4, -200.0, -88.0, 88.0, 6e4, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype, device=device)
    assert_rounded_alike(silu_mul(gate_up), torch_silu_mul.silu_mul(gate_up))
