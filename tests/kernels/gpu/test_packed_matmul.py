from __future__ import annotations

import pytest
import torch

from eventlm.kernels.gpu.packed_matmul import packed_matmul
from eventlm.kernels.gpu.packed_weight import empty_packed
from tests.kernels.gpu.packed import packed_matrix, random_blocks

#: Of |output - reference| / |reference|: numbers of the matrix are rounded to x's type, and so is the result.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
CONFIG = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_out", "num_in", "dtype"),
    [
        ("Q4_0", 3, 40, 96, torch.float32),
        ("Q4_1", 17, 33, 64, torch.bfloat16),
        ("Q8_0", 1, 70, 160, torch.float16),
        ("I4_32", 5, 32, 128, torch.float32),
        ("I4_128", 2, 48, 160, torch.bfloat16),
        ("I8_32", 4, 31, 96, torch.float32),
        ("I8_128", 33, 24, 288, torch.float32),
        ("MXFP4", 2, 40, 96, torch.float32),
    ],
)
def test_against_the_values(
    kind: str, num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, device: torch.device
) -> None:
    matrix, values = packed_matrix(kind, num_out, num_in, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, num_in + 8, generator=generator).to(device, dtype)[:, 4:-4]
    bias = torch.randn(num_out, generator=generator).to(device, dtype)
    for own_bias in (bias, None):
        exact = x.double() @ values.double().t() + (0 if own_bias is None else own_bias.double())
        for config in (None, CONFIG):
            out = packed_matmul(x, matrix, own_bias, config=config)
            assert out.dtype == dtype
            assert (out.double() - exact).norm() <= TOLERANCES[dtype] * exact.norm()


def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    matrix, _ = packed_matrix("Q4_0", 40, 128, device)
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    together = packed_matmul(x, matrix, is_invariant=True)
    assert torch.equal(packed_matmul(x[7:8], matrix, is_invariant=True), together[7:8])


def test_no_rows(device: torch.device) -> None:
    matrix, _ = packed_matrix("Q4_0", 40, 64, device)
    assert packed_matmul(torch.empty(0, 64, device=device), matrix).shape == (0, 40)


@pytest.mark.parametrize("kind", ["Q4_1", "MXFP4", "I8_32"])
def test_experts(kind: str, device: torch.device) -> None:
    """Of which one has no rows; the last rows are no one's."""
    pieces = [random_blocks(kind, 24, 96, seed=number) for number in range(3)]
    weight = empty_packed(kind, 3, 24, 96, device=device)
    for number, (blocks, _) in enumerate(pieces):
        weight.of_expert(number).load(0, blocks)
    x = torch.randn(25, 96, generator=torch.Generator().manual_seed(1)).to(device)
    offsets = [0, 19, 19, 23]
    on_device = torch.tensor(offsets, dtype=torch.int32, device=device)
    for config in (None, CONFIG):
        out = packed_matmul(x, weight, offsets_E1=on_device, config=config)
        for (_, values), first, end in zip(pieces, offsets[:-1], offsets[1:], strict=True):
            torch.testing.assert_close(out[first:end], x[first:end] @ values.to(device).t(), atol=1e-4, rtol=1e-4)
