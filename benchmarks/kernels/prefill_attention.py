"""Prefill attention: many new tokens a row over its paged context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import AttentionExtras, attention_reference
from benchmarks.kernels.tune import Config, Tuning
from eventlm.kernels.gpu.prefill_attention import make_tiles, prefill_attention, tile_queries
from eventlm.kernels.gpu.tuned import tuned

_BLOCK_SIZE = 16
#: Queries whose scores the reference holds at a time.
_REFERENCE_QUERIES = 256
#: Configurations that are tried: BLOCK_M, BLOCK_N, warps, stages. Of four warps two programs fit beside each other, so
#: that one's products fill the other's softmax.
_CANDIDATES = [
    *[(128, 64, 8, 5), (128, 128, 8, 5), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2)],
    *[(128, 32, 4, 3), (128, 64, 4, 3), (64, 64, 4, 5), (64, 64, 4, 3), (64, 128, 4, 5), (64, 128, 4, 3)],
]


class _Shape(NamedTuple):
    num_rows: int
    start: int
    num_queries: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    fp8: bool = False
    target: float = 0.0
    extras: AttentionExtras = AttentionExtras()


class _Inputs(NamedTuple):
    shape: _Shape
    q: Tensor
    cache: Tensor
    scales: Tensor | None
    tables: Tensor


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Rows are alike: `num_queries` queries after `start` tokens that are in the cache."""
    if smoke:
        yield _case(_Shape(2, 0, 70, num_heads=4, num_kv_heads=2, head_dim=64), device)
        yield _case(_Shape(1, 33, 40, num_heads=4, num_kv_heads=2, head_dim=64, fp8=True), device)
        small = _Shape(1, 33, 40, num_heads=4, num_kv_heads=2, head_dim=64)
        yield _case(small._replace(extras=AttentionExtras(40, 3.0, has_sinks=True)), device)
        return
    yield _case(_Shape(1, 0, 16384, target=0.6), device)
    yield _case(_Shape(1, 0, 16384, num_heads=32, num_kv_heads=32), device)
    yield _case(_Shape(1, 0, 16384, fp8=True), device)
    yield _case(_Shape(1, 0, 16384, num_heads=14, num_kv_heads=2, head_dim=64), device)
    yield _case(_Shape(8, 0, 2048), device)
    yield _case(_Shape(64, 0, 256), device)
    yield _case(_Shape(4, 14336, 2048), device)
    yield _case(_Shape(64, 8191, 1), device)
    # As gpt-oss and Gemma 2 have it, with a cap that is low enough to change random scores.
    yield _case(_Shape(1, 0, 16384, num_heads=64, head_dim=64, extras=AttentionExtras(128, has_sinks=True)), device)
    yield _case(_Shape(1, 0, 16384, num_heads=16, head_dim=256, extras=AttentionExtras(4096, 3.0)), device)


def tunings(device: torch.device, *, smoke: bool) -> Iterator[Tuning]:
    """One for each size of heads and type of cache, measured with a long prompt and with several shorter ones."""
    for head_dim, fp8 in [(64, False)] if smoke else [(64, False), (64, True), (128, False), (128, True)]:
        shapes = (
            [_Shape(1, 0, 40, num_heads=4, num_kv_heads=2)] if smoke else [_Shape(1, 0, 8192), _Shape(8, 512, 1024)]
        )
        inputs = [_inputs(shape._replace(head_dim=head_dim, fp8=fp8), device) for shape in shapes]
        dtypes = ("float8_e4m3fn",) if fp8 else ("bfloat16", "float16")
        configs: list[Config] = [
            {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
            for block_m, block_n, num_warps, num_stages in _CANDIDATES
        ]
        yield Tuning(
            name=f"prefill_attention, {dtypes[0]}, heads of {head_dim}",
            op="prefill_attention",
            shapes=[{"dtype": dtype, "max_head_dim": head_dim} for dtype in dtypes],
            current=tuned("prefill_attention", dtype=dtypes[0], head_dim=head_dim),
            candidates=configs[:1] if smoke else configs,
            runs=[_run_as(each) for each in inputs],
            references=[partial(_reference, each) for each in inputs],
        )


def _inputs(shape: _Shape, device: torch.device) -> _Inputs:
    generator = torch.Generator(device).manual_seed(1)
    max_blocks = -(-(shape.start + shape.num_queries) // _BLOCK_SIZE)
    num_blocks = shape.num_rows * max_blocks
    size = (2, num_blocks, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
    cache = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    scales = None
    if shape.fp8:
        cache = cache.to(torch.float8_e4m3fn)
        scales = torch.rand(size[:-1], generator=generator, device=device)
    tables = torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32)
    q = torch.empty(
        shape.num_rows * shape.num_queries, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device
    )
    return _Inputs(shape, q.normal_(generator=generator), cache, scales, tables.view(shape.num_rows, max_blocks))


def _case(shape: _Shape, device: torch.device) -> KernelCase:
    num_rows, start, num_queries, num_heads, num_kv_heads, head_dim, fp8, *_ = shape
    inputs = _inputs(shape, device)
    window = shape.extras.window or start + num_queries
    seen = sum(min(position + 1, window) for position in range(start, start + num_queries))
    num_read = min(start + num_queries, window - 1 + num_queries)
    token_bytes = 2 * num_kv_heads * (head_dim * inputs.cache.element_size() + 4 * fp8)
    # The peer has a causal mask for whole prompts alone.
    peer = None if start or fp8 or shape.extras.name else _peer(inputs)
    name = f"{num_rows} x {num_queries} after {start}, heads {num_heads}/{num_kv_heads} of {head_dim}"
    return KernelCase(
        name + (", fp8" if fp8 else "") + shape.extras.name,
        _run(inputs),
        partial(_reference, inputs),
        num_bytes=num_rows * num_read * token_bytes + 2 * inputs.q.nbytes,
        num_flops=4 * num_rows * seen * num_heads * head_dim,
        peer=peer,
        peer_name="torch flash attention" if peer else "",
        target=shape.target,
        peer_target=0.9 if peer and shape.target else 0.0,
    )


def _run_as(inputs: _Inputs) -> Callable[[Config], Tensor]:
    """What the host makes for a configuration it makes once."""
    runs: dict[str, Callable[[], Tensor]] = {}

    def run(config: Config) -> Tensor:
        if str(config) not in runs:
            runs[str(config)] = _run(inputs, config)
        return runs[str(config)]()

    return run


def _run(inputs: _Inputs, config: Config | None = None) -> Callable[[], Tensor]:
    shape, q, cache, scales, tables = inputs
    num_rows, start, num_queries, num_heads, num_kv_heads, head_dim, *_ = shape
    starts = torch.full((num_rows,), start, dtype=torch.int32, device=q.device)
    slots = torch.arange(num_rows, dtype=torch.int32, device=q.device)
    query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=q.device) * num_queries
    if config is None:
        block_m = tile_queries(num_heads, num_kv_heads, head_dim, cache.dtype)
    else:
        block_m = config["BLOCK_M"] // (num_heads // num_kv_heads)
    tiles = torch.from_numpy(make_tiles([start] * num_rows, [num_queries] * num_rows, block_m)).to(q.device)
    out, scale, options = torch.empty_like(q), head_dim**-0.5, shape.extras.options(shape.num_heads, q.device)

    def run() -> Tensor:
        prefill_attention(
            *(q, cache, scales, tables, slots, starts, query_starts, tiles),
            scale=scale,
            out_THD=out,
            config=config,
            **options,
        )
        return out

    return run


def _peer(inputs: _Inputs) -> Callable[[], Tensor]:
    """Keys and values lie dense, those of a head that several share once each."""
    shape, q, _, _, _ = inputs
    queries = q.view(shape.num_rows, shape.num_queries, shape.num_heads, shape.head_dim).transpose(1, 2)
    context = torch.stack([_context(inputs, row) for row in range(shape.num_rows)], dim=1).to(q.dtype)
    keys, values = context.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _context(inputs: _Inputs, row: int) -> Tensor:
    """Keys and values of a row, float32 [2, K, L, D]."""
    blocks = inputs.tables[row].long()
    context = inputs.cache[:, blocks].float()
    if inputs.scales is not None:
        context *= inputs.scales[:, blocks][..., None]
    length = inputs.shape.start + inputs.shape.num_queries
    return context.transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2)


def _reference(inputs: _Inputs) -> Tensor:
    return torch.cat([_attend(inputs, row) for row in range(inputs.shape.num_rows)])


def _attend(inputs: _Inputs, row: int) -> Tensor:
    """One row in float32, some queries at a time."""
    shape = inputs.shape
    keys, values = _context(inputs, row).repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1)
    q = inputs.q[row * shape.num_queries : (row + 1) * shape.num_queries].float().transpose(0, 1)
    positions = shape.start + torch.arange(shape.num_queries, device=q.device)
    outs, options = [], shape.extras.options(shape.num_heads, q.device)
    for first in range(0, shape.num_queries, _REFERENCE_QUERIES):
        part = slice(first, first + _REFERENCE_QUERIES)
        args = (q[:, part], keys, values, positions[part])
        outs.append(attention_reference(*args, scale=shape.head_dim**-0.5, **options))
    return torch.cat(outs, dim=1).transpose(0, 1)
