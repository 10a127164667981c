from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.packed_weight import KINDS, PackedWeight
from tests.kernels.gpu.packed import packed_matrix


def values_of(matrix: PackedWeight) -> Tensor:
    """As the class says what they are."""
    codes = matrix.codes
    if matrix.bits == 4:
        units = codes.unflatten(1, (-1, 32))
        codes = torch.stack((units & 15, units >> 4), dim=2).flatten(1)[:, : matrix.num_in]
    groups = torch.arange(matrix.num_in) // matrix.group
    scales, numbers = matrix.scales.float()[:, groups], codes.float()
    if matrix.shifts is None:
        return scales * (numbers - (1 << matrix.bits - 1))
    shifts = matrix.shifts.float()[:, groups]
    return scales * numbers + shifts if matrix.is_added else scales * (numbers - shifts)


@pytest.mark.parametrize("num_in", [64, 160])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_matrix_holds_the_values_of_its_blocks(kind: str, num_in: int) -> None:
    matrix, values = packed_matrix(kind, 7, num_in, torch.device("cpu"))
    assert torch.equal(values_of(matrix), values)
    assert matrix.num_out == 7
    assert matrix.nbytes < 7 * (num_in + 32) * (1.3 if matrix.bits == 8 else 0.75)
