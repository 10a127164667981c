from __future__ import annotations

import pytest
import torch

from eventlm.kernels.kv_store import head_slots, kv_store


@pytest.mark.parametrize(("num_kv_heads", "block_size"), [(2, 4), (1, 16), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_lands_in_its_slot(num_kv_heads: int, block_size: int, dtype: torch.dtype) -> None:
    head_dim, num_blocks = 8, 40
    cache = torch.zeros(2, num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 6, num_kv_heads, head_dim, generator=generator).to(dtype).unbind()
    slots = torch.tensor([28, 29, 30, 31, 8, 39])
    kv_store(cache, k, v, head_slots(slots, block_size=block_size, num_kv_heads=num_kv_heads))
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[0, slot // block_size, :, slot % block_size], k[token])
        assert torch.equal(cache[1, slot // block_size, :, slot % block_size], v[token])
    assert cache.count_nonzero() == k.count_nonzero() + v.count_nonzero()
