"""Where keys and values go."""

from __future__ import annotations

import pytest
import torch

from eventlm.kernels.gpu.cache_slots import cache_slots, cache_slots_reference


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 130])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_each_token_has_its_place(num_tokens: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    tables = torch.randint(0, 1 << 27, (5, 9), generator=generator, dtype=torch.int32)
    token_slots = torch.randint(-1, 5, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 9 * block_size, (num_tokens,), generator=generator, dtype=torch.int32)
    found = cache_slots(token_slots, positions, tables, block_size)
    assert torch.equal(found, cache_slots_reference(token_slots, positions, tables, block_size))
