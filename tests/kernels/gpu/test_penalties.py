from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.penalties import apply_penalties


def penalized(logits: Tensor, rows: Tensor, penalties: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """By the definitions, an entry at a time, in float64."""
    expected = logits.double()
    for row, (repetition, frequency, presence), row_ids, row_counts in zip(
        rows.tolist(), penalties.tolist(), ids.tolist(), counts.tolist(), strict=True
    ):
        for token, count in zip(row_ids, row_counts, strict=True):
            if token >= 0:
                x = expected[row, token]
                x = x / repetition if x > 0 else x * repetition
                expected[row, token] = x - frequency * count - presence * (count > 0)
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ids", [0, 1, 300])
def test_penalties(dtype: torch.dtype, num_ids: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    logits = (torch.randn(5, 407, generator=generator) * 3)[:, :400].to(dtype)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32)
    penalties = torch.tensor([[1.3, 0.25, 0.5], [0.7, -1.0, 2.0], [1.0, 0.0, -0.5]])
    ids = torch.stack([torch.randperm(400, generator=generator)[:num_ids] for _ in rows]).to(torch.int32)
    ids[1, num_ids // 2 :] = -1
    counts = torch.randint(0, 4, ids.shape, generator=generator, dtype=torch.int32)
    expected = penalized(logits, rows, penalties, ids, counts)
    found = logits.to(device)
    apply_penalties(found, *(each.to(device) for each in (rows, penalties, ids, counts)))
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[1:3].cpu(), logits[1:3])


def test_columns_of_one_tensor(device: torch.device) -> None:
    packed = torch.tensor([[0, 2, 5, -1, 0, 3, 0]], dtype=torch.int32, device=device)
    logits = torch.ones(1, 8, device=device)
    penalties = torch.tensor([[2.0, 0.5, 1.0]], device=device)
    apply_penalties(logits, packed[:, 0], penalties, packed[:, 1:4], packed[:, 4:7])
    assert logits[0].tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 0.5 - 0.5 * 3 - 1.0, 1.0, 1.0]
