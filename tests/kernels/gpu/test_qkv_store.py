from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from benchmarks.kernels.references import qkv_store_reference
from eventlm.kernels.gpu.qkv_store import qkv_store
from tests.kernels.gpu.tensors import DTYPES, assert_rounded_alike, random, rows_apart

_EPS, _NUM_BLOCKS, _NUM_POSITIONS = 1e-6, 40, 50
FP8 = torch.float8_e4m3fn


@dataclass
class _Step:
    """What `qkv_store` takes, with a poisoned cache."""

    num_heads: int
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    weights: tuple[Tensor, Tensor] | tuple[None, None]
    cache: Tensor
    scales: Tensor | None

    def results(self, function: object = qkv_store) -> tuple[Tensor, Tensor, Tensor | None]:
        """qkv, cache and scales behind a call, which are copies."""
        assert callable(function)
        qkv, cache = self.qkv.clone(), self.cache.clone()
        scales = None if self.scales is None else self.scales.clone()
        tables = (self.positions, self.slots, self.cos, self.sin)
        function(qkv, *tables, *self.weights, _EPS, cache, scales, self.num_heads)
        return qkv, cache, scales


def _step(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    num_tokens: int = 3,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    normed: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> _Step:
    generator = torch.Generator().manual_seed(5)
    num_heads, num_kv_heads = heads
    angles = torch.rand(_NUM_POSITIONS, head_dim // 2, generator=generator) * 6
    shape = (2, _NUM_BLOCKS, num_kv_heads, block_size)
    q_weight, k_weight = (random((head_dim,), dtype, device, seed=seed) for seed in (1, 2))
    # The first block is nobody's.
    slots = block_size + torch.randperm((_NUM_BLOCKS - 1) * block_size, generator=generator)[:num_tokens]
    positions = torch.randint(_NUM_POSITIONS, (num_tokens,), generator=generator, dtype=torch.int32)
    return _Step(
        num_heads=num_heads,
        qkv=random((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), dtype, device) * 3,
        positions=positions.to(device),
        slots=slots.to(device),
        cos=angles.cos().to(device, dtype),
        sin=angles.sin().to(device, dtype),
        weights=(q_weight, k_weight) if normed else (None, None),
        cache=torch.full((*shape, head_dim), torch.nan, device=device).to(cache_dtype or dtype),
        scales=torch.full(shape, torch.nan, device=device) if cache_dtype == FP8 else None,
    )


def _written(step: _Step, results: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Keys and values [T, K, D] at the slots in float32; all else in the cache must be as it was."""
    _, cache, scales = results
    block_size = cache.shape[3]
    numbers = cache.float() if scales is None else cache.float() * scales[..., None]
    blocks, indices = step.slots // block_size, step.slots % block_size
    keys, values = numbers[0, blocks, :, indices], numbers[1, blocks, :, indices]
    numbers[:, blocks, :, indices] = torch.nan
    assert numbers.isnan().all()
    assert scales is None or scales.isnan().sum() == scales.numel() - keys[..., 0].numel() * 2
    return keys, values


def _turned_by_transformers(step: _Step) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] and keys [T, K, D]."""
    head_dim, num_kv_heads = step.cache.shape[-1], step.cache.shape[2]
    heads = step.qkv.unflatten(1, (-1, head_dim)).transpose(0, 1)
    q, k = heads[: step.num_heads], heads[step.num_heads : -num_kv_heads]
    if step.weights[0] is not None:
        norms = [Qwen3RMSNorm(head_dim, _EPS) for _ in range(2)]
        for norm, weight in zip(norms, step.weights, strict=True):
            norm.weight = torch.nn.Parameter(weight)
        q, k = norms[0](q).detach(), norms[1](k).detach()
    cos, sin = (torch.cat((table, table), -1)[step.positions] for table in (step.cos, step.sin))
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)
    return q.transpose(0, 1), k.transpose(0, 1)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim", "block_size"),
    [(1, (1, 1), 32, 16), (33, (2, 1), 64, 4), (3, (9, 3), 64, 16), (2, (40, 8), 128, 32), (5, (6, 6), 80, 1)],
    ids=str,
)
def test_against_transformers(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    normed: bool,
    device: torch.device,
) -> None:
    shape = {"num_tokens": num_tokens, "head_dim": head_dim, "block_size": block_size}
    step = _step(device, dtype, heads=heads, normed=normed, **shape)
    results = step.results()
    queries, rest = results[0].split((heads[0] * head_dim, 2 * heads[1] * head_dim), dim=1)
    expected_queries, expected_keys = _turned_by_transformers(step)
    assert_rounded_alike(queries.unflatten(1, (-1, head_dim)), expected_queries, differing=0.02 if normed else 0.0)
    assert torch.equal(rest, step.qkv[:, heads[0] * head_dim :])
    keys, values = _written(step, results)
    assert_rounded_alike(keys.to(dtype), expected_keys, differing=0.02 if normed else 0.0)
    assert torch.equal(values.to(dtype).flatten(1), step.qkv[:, -heads[1] * head_dim :])


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("num_tokens", "heads", "head_dim"), [(1, (9, 3), 64), (7, (4, 1), 48), (2, (8, 20), 128)])
def test_fp8_against_torch(
    num_tokens: int, heads: tuple[int, int], head_dim: int, normed: bool, device: torch.device
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    shape = {"num_tokens": num_tokens, "heads": heads, "head_dim": head_dim, "normed": normed, "cache_dtype": FP8}
    # On GPUs torch divides by a number less exactly: it multiplies by the inverse.
    step, on_host = _step(device, **shape), _step(torch.device("cpu"), **shape)
    results, expected = step.results(), on_host.results(qkv_store_reference)
    differing = 0.02 if normed else 0.0
    assert_rounded_alike(results[0].cpu(), expected[0], differing=differing)
    keys, values = (part.cpu() for part in _written(step, results))
    expected_keys, expected_values = _written(on_host, expected)
    assert torch.equal(values, expected_values)
    # A step of fp8 where the number before it has been rounded otherwise.
    torch.testing.assert_close(keys, expected_keys, rtol=0.13, atol=1e-3)
    assert (keys != expected_keys).float().mean() <= differing
    exact = on_host.qkv[:, -heads[1] * head_dim :].unflatten(1, (-1, head_dim)).float()
    # Half a step: a 16th of a number, or the half of fp8's smallest.
    tolerance = torch.maximum(exact.abs() / 16, exact.abs().amax(-1, keepdim=True) / 448 * 2**-10)
    assert ((values - exact).abs() <= tolerance * 1.001).all()


def test_of_padding_nothing_is_read_or_written(device: torch.device) -> None:
    step = _step(device, num_tokens=5, normed=True)
    step.slots[[1, 4]] = -1
    step.positions[[1, 4]] = 2_000_000_000
    results = step.results()
    assert torch.equal(results[0][[1, 4]], step.qkv[[1, 4]])
    rows = [0, 2, 3]
    step.qkv, step.positions, step.slots = step.qkv[rows], step.positions[rows], step.slots[rows]
    alone = step.results()
    assert torch.equal(results[0][rows], alone[0])
    assert torch.equal(results[1].nan_to_num(1e4), alone[1].nan_to_num(1e4))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_rows_and_caches_may_be_parts_of_larger_tensors(cache_dtype: torch.dtype, device: torch.device) -> None:
    if cache_dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    step = _step(device, cache_dtype=cache_dtype)
    expected = step.results()
    apart = rows_apart((step.qkv.shape[0], step.qkv.shape[1]), torch.bfloat16, device)
    apart.rows.copy_(step.qkv)
    # Layers beside each other in each block, and the last of three.
    cache = torch.full((_NUM_BLOCKS, 3, *step.cache.shape[0:1], *step.cache.shape[2:]), torch.nan, device=device)
    layer = cache.to(cache_dtype)[:, 2].transpose(0, 1)
    scales = None
    if step.scales is not None:
        scales = torch.full((_NUM_BLOCKS, 3, *cache.shape[2:-1]), torch.nan, device=device)[:, 2].transpose(0, 1)
    tables = (step.positions, step.slots, step.cos, step.sin)
    qkv_store(apart.rows, *tables, None, None, _EPS, layer, scales, step.num_heads)
    assert torch.equal(apart.rows, expected[0])
    assert apart.rest_is_nan()
    for ours, theirs in zip(_written(step, (apart.rows, layer, scales)), _written(step, expected), strict=True):
        assert torch.equal(ours, theirs)


def test_heads_of_zeros_are_stored_as_fp8_and_nan_is_not_lost(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    step = _step(device, heads=(1, 1), cache_dtype=FP8)
    step.qkv[0] = 0
    step.qkv[1, -3] = torch.nan
    step.qkv[2, -3] = torch.inf
    _, cache, scales = step.results()
    assert scales is not None
    block_size = cache.shape[3]
    stored = cache.float() * scales[..., None]
    at = [stored[:, slot // block_size, 0, slot % block_size] for slot in step.slots.tolist()]
    assert not at[0].any()
    assert at[1][1, -3].isnan()
    assert at[2][1, -3].isnan()
    assert at[1][0].isfinite().all()
    assert at[2][0].isfinite().all()
