from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention
from eventlm.models.config import kv_bytes_per_token, read_model
from eventlm.worker.cache_engine import CacheEngine
from tests.checkpoints import make_checkpoint

#: Two chunks and a decode.
ROWS = [(0, 9), (12, 5), (30, 1)]
BLOCK_SIZE = 4


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_each_layer_attends_by_its_own_spec(tmp_path: Path, kv_dtype: str) -> None:
    model = read_model(make_checkpoint(tmp_path))
    changes = [{}, {"window": 6}, {"soft_cap": 2.0, "scale": 0.5}, {"window": 3, "has_sinks": True}]
    changes.append({"num_kv_heads": 4, "head_dim": 8, "window": 6})
    changes.append({"keys_of": 1, "window": 2})
    layers = [structs.replace(model.layers[0], attention=structs.replace(model.attention, **each)) for each in changes]
    model = structs.replace(model, layers=tuple(layers))
    generator = torch.Generator().manual_seed(0)
    sinks = [None, None, None, torch.randn(model.num_heads, generator=generator), None, None]
    cache = CacheEngine(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=40,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        device=torch.device("cpu"),
    )
    tables = np.random.default_rng(0).permutation(40).astype(np.int32)[:30].reshape(3, 10)
    rows = [AttentionRow(start, count, table) for (start, count), table in zip(ROWS, tables, strict=True)]
    positions = [np.arange(row.start, row.start + row.num_tokens) for row in rows]
    slots = [
        row.block_table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
        for row, own in zip(rows, positions, strict=True)
    ]
    attention = cache.attention(torch.from_numpy(np.concatenate(slots)).long(), rows, sinks)
    for number, (layer, sinks_H) in enumerate(zip(layers, sinks, strict=True)):
        spec = layer.attention
        q = torch.randn(15, spec.num_heads, spec.head_dim, generator=generator)
        k, v = torch.randn(2, 15, *spec.kv_shape, generator=generator)
        before = cache.kv.clone()
        found = attention(number, q, *((k, v) if spec.keys_of < 0 else (None, None)))
        kv = cache.stored[number if spec.keys_of < 0 else spec.keys_of]
        assert torch.equal(before.view(torch.uint8), cache.kv.view(torch.uint8)) == (spec.keys_of >= 0)
        groups = plan_attention(rows, kv, torch.float32, [spec.window])
        expected = paged_attention(
            q,
            kv,
            groups,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_H=sinks_H,
        )
        assert torch.equal(found, expected)
        # Nothing but the values of the step has been stored.
        assert kv.count_nonzero() > 0
        assert not any(each.any() for each in cache.stored[number + 1 :])
    assert cache.token_bytes == kv_bytes_per_token(model, kv_dtype)
    # Nothing of them is cleared but what is asked for.
    before = cache.kv.count_nonzero()
    cache.clear_slots(torch.tensor(slots[1][:2]).long())
    cleared = before - cache.kv.count_nonzero()
    assert 0 < cleared <= 2 * cache.token_bytes
    blocks = tables[2][:2].tolist()
    cache.clear(max(blocks) + 1)
    assert not any(each[:, blocks].any() for each in cache.stored)
