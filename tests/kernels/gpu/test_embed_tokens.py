from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.references import embed_tokens_reference
from eventlm.kernels.gpu.embed_tokens import embed_tokens
from tests.kernels.gpu.tensors import DTYPES, random, rows_apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 64), (33, 80), (3, 576), (2, 5120), (1, 33)])
def test_against_torch(num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = random((50, hidden_size), dtype, device)
    last_tokens = torch.randint(50, (8,), generator=generator, dtype=torch.int32).to(device)
    staged = torch.randint(-8, 50, (num_tokens,), generator=generator, dtype=torch.int32).to(device)
    expected, out = (torch.full((num_tokens, hidden_size), torch.nan, dtype=dtype, device=device) for _ in range(2))
    embed_tokens_reference(staged, last_tokens, embedding, expected)
    embed_tokens(staged, last_tokens, embedding, out)
    assert torch.equal(out, expected)


def test_negative_numbers_are_slots(device: torch.device) -> None:
    embedding = torch.arange(6, dtype=torch.float32, device=device)[:, None].expand(-1, 16).contiguous()
    last_tokens = torch.tensor([5, -7, 3], dtype=torch.int32, device=device)
    out = torch.empty(5, 16, device=device)
    embed_tokens(torch.tensor([0, -1, 4, -3, 5], dtype=torch.int32, device=device), last_tokens, embedding, out)
    assert out[:, 0].tolist() == out[:, 15].tolist() == [0, 5, 4, 3, 5]


def test_a_row_without_a_token_goes_on_with_token_0(device: torch.device) -> None:
    """What it computes is not used, but memory before the embedding must not be read."""
    embedding = torch.full((7, 16), torch.nan, device=device)
    embedding[4] = 1.0
    out = torch.empty(1, 16, device=device)
    staged, last_tokens = (torch.tensor([-1], dtype=torch.int32, device=device) for _ in range(2))
    embed_tokens(staged, last_tokens, embedding[4:], out)
    assert out.tolist() == [[1.0] * 16]


def test_nothing_beside_the_rows_is_written(device: torch.device) -> None:
    embedding, out = rows_apart((9, 48), torch.bfloat16, device), rows_apart((5, 48), torch.bfloat16, device)
    staged = torch.tensor([8, 0, -1, 3, 3], dtype=torch.int32, device=device)
    embed_tokens(staged, torch.tensor([7], dtype=torch.int32, device=device), embedding.rows, out.rows)
    assert torch.equal(out.rows, embedding.rows[[8, 0, 7, 3, 3]])
    assert out.rest_is_nan()
