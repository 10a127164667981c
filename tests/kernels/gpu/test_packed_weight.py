from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.code_types import CODE_TYPES, code_bytes
from eventlm.kernels.gpu.packed_weight import PackedWeight, empty_packed
from tests.kernels.gpu.packed import packed_matrix

FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def values_of(matrix: PackedWeight) -> Tensor:
    """As the class says what they are."""
    codes, kind = matrix.codes, matrix.code_type
    if kind.bits == 4:
        units = codes.unflatten(1, (-1, 32))
        codes = torch.stack((units & 15, units >> 4), dim=2).flatten(1)[:, : matrix.num_in]
    groups = torch.arange(matrix.num_in) // kind.group
    scales, numbers = matrix.scales.float()[:, groups], codes.float()
    if kind.is_float:
        return scales * FLOATS[codes.long()]
    if matrix.shifts is None:
        return scales * (numbers - (1 << kind.bits - 1))
    shifts = matrix.shifts.float()[:, groups]
    return scales * numbers + shifts if kind.shift == "added" else scales * (numbers - shifts)


@pytest.mark.parametrize("num_in", [64, 160])
@pytest.mark.parametrize("kind", CODE_TYPES)
def test_a_matrix_holds_the_values_of_its_blocks(kind: str, num_in: int) -> None:
    matrix, values = packed_matrix(kind, 7, num_in, torch.device("cpu"))
    assert torch.equal(values_of(matrix), values)
    assert matrix.num_out == 7
    assert matrix.nbytes == code_bytes(kind, 7, num_in)


def test_experts_are_filled_one_by_one() -> None:
    experts = empty_packed("I4_32", 3, 7, 64, device="cpu")
    for part in experts[:3]:
        part.zero_()
    matrix, _ = packed_matrix("I4_32", 7, 64, torch.device("cpu"))
    own = experts.of_expert(1)
    for part, whole in zip(own[:3], matrix[:3], strict=True):
        part.copy_(whole)
    assert torch.equal(values_of(experts.of_expert(1)), values_of(matrix))
    assert not values_of(experts.of_expert(2)).any()
