from __future__ import annotations

from typing import Literal

import pytest
import torch
from transformers.activations import ACT2FN

from eventlm.kernels.gpu.gates import gelu_mul, silu_mul
from eventlm.kernels.pointwise import activate_gated
from tests.kernels.gpu.tensors import DTYPES, assert_rounded_alike, random, rows_apart

Approximate = Literal["none", "tanh"]
_OF_TRANSFORMERS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (2, 1536), (33, 24), (7, 1025), (1, 33)])
def test_silu_against_torch(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = random((num_tokens, 2 * size), dtype, device) * 4
    assert_rounded_alike(silu_mul(gate_up), activate_gated(gate_up, "silu"))


def test_silu_nothing_beside_the_rows_is_read_or_written(device: torch.device) -> None:
    gate_up, out = rows_apart((5, 96), torch.bfloat16, device), rows_apart((5, 48), torch.bfloat16, device)
    silu_mul(gate_up.rows, out.rows)
    assert_rounded_alike(out.rows, activate_gated(gate_up.rows, "silu"))
    assert out.rest_is_nan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_large_gates_neither_overflow_nor_become_nan(dtype: torch.dtype, device: torch.device) -> None:
    gate_up = torch.tensor([[-6e4, -200.0, -88.0, 88.0, 6e4, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype, device=device)
    assert_rounded_alike(silu_mul(gate_up), activate_gated(gate_up, "silu"))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (2, 1536), (33, 24), (1, 1025)])
def test_gelu_against_transformers(
    num_tokens: int, size: int, dtype: torch.dtype, approximate: Approximate, device: torch.device
) -> None:
    gate_up = random((num_tokens, 2 * size), dtype, device) * 2
    gate, up = gate_up.chunk(2, dim=-1)
    expected = ACT2FN[_OF_TRANSFORMERS[approximate]](gate.float()).to(dtype) * up
    out = gelu_mul(gate_up, approximate)
    # Far below zero 1 + tanh and 1 + erf have few bits left, and other ones on each side.
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert dtype == torch.float32 or (out != expected).float().mean() <= 0.1


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_nothing_beside_the_rows_is_read_or_written(approximate: Approximate, device: torch.device) -> None:
    gate_up, out = rows_apart((5, 96), torch.bfloat16, device), rows_apart((5, 48), torch.bfloat16, device)
    gelu_mul(gate_up.rows, approximate, out.rows)
    assert_rounded_alike(out.rows, activate_gated(gate_up.rows, "gelu" if approximate == "none" else "gelu_tanh"))
    assert out.rest_is_nan()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_large_gates_neither_overflow_nor_become_nan(approximate: Approximate, device: torch.device) -> None:
    gate_up = torch.tensor([[-6e4, -200.0, -12.0, 12.0, 6e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gelu_mul(gate_up, approximate).tolist() == [[0.0, 0.0, 0.0, 12.0, 6e4]]
