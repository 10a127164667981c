from __future__ import annotations

import pytest
import torch

from eventlm.kernels.gpu.qkv_store import qkv_store
from eventlm.kernels.gpu.store_heads import store_heads
from tests.kernels.gpu.paged import FP8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_it_stores_what_qkv_store_stores(dtype: torch.dtype, device: torch.device) -> None:
    """With tables that turn nothing; padding is left out."""
    num_kv_heads, head_dim = 3, 24
    own = torch.bfloat16 if dtype == FP8 else dtype
    qkv = torch.randn(4, (1 + 2 * num_kv_heads) * head_dim, generator=torch.Generator().manual_seed(1)).to(device, own)
    qkv[2, head_dim : 2 * head_dim] = 0
    slots = torch.tensor([9, -1, 0, 31], device=device)
    caches = [torch.zeros(2, 4, num_kv_heads, 8, head_dim, device=device).to(dtype) for _ in range(2)]
    scales = [torch.zeros(caches[0].shape[:-1], device=device) if dtype == FP8 else None for _ in range(2)]
    cos, sin = torch.ones(1, head_dim // 2, device=device, dtype=own), torch.zeros(1, head_dim // 2, device=device)
    positions = torch.zeros(4, dtype=torch.int32, device=device)
    qkv_store(qkv, positions, slots, cos, sin.to(own), None, None, 1e-6, caches[0], scales[0], num_heads=1)
    keys, values = qkv[:, head_dim:].unflatten(1, (2, num_kv_heads, head_dim)).unbind(1)
    store_heads(keys, values, slots, caches[1], scales[1])
    assert torch.equal(*(cache.float() for cache in caches))
    assert caches[1].float().any()
    if dtype == FP8:
        assert torch.equal(*(each for each in scales if each is not None))
