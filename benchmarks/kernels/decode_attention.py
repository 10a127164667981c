"""Decode attention: one new token a row over its paged context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import AttentionExtras, attention_reference
from benchmarks.kernels.tune import Config, Tuning
from eventlm.kernels.gpu.decode_attention import SplitScratch, decode_attention, num_splits
from eventlm.kernels.gpu.tuned import tuned

_BLOCK_SIZE = 16


#: Configurations that are tried: BLOCK_N, warps, stages.
_CANDIDATES = [
    (block_n, num_warps, num_stages) for block_n in (32, 64, 128) for num_warps in (4, 8) for num_stages in (5, 7)
]


class _Shape(NamedTuple):
    num_rows: int
    context: int
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
    lengths: Tensor


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """All rows of a batch have the same context, except in the ragged one."""
    if smoke:
        yield _case(_Shape(2, 70, num_heads=4, num_kv_heads=2, head_dim=64), device)
        yield _case(_Shape(2, 70, num_heads=4, num_kv_heads=2, head_dim=64, fp8=True), device)
        small = _Shape(2, 70, num_heads=4, num_kv_heads=2, head_dim=64)
        yield _case(small._replace(extras=AttentionExtras(40, 3.0, has_sinks=True)), device)
        return
    yield _case(_Shape(64, 8192, target=0.85), device)
    yield _case(_Shape(64, 8192, fp8=True), device)
    yield _case(_Shape(64, 8192), device, ragged=True)
    yield _case(_Shape(256, 2048), device)
    yield _case(_Shape(16, 8192), device)
    yield _case(_Shape(1, 1024), device)
    yield _case(_Shape(1, 131072), device)
    yield _case(_Shape(64, 8192, num_heads=64), device)
    yield _case(_Shape(64, 8192, num_heads=14, num_kv_heads=2, head_dim=64), device)
    # As gpt-oss and Gemma 2 have it, with a cap that is low enough to change random scores.
    yield _case(_Shape(64, 8192, num_heads=64, head_dim=64, extras=AttentionExtras(128, has_sinks=True)), device)
    yield _case(_Shape(64, 8192, num_heads=16, head_dim=256, extras=AttentionExtras(4096, 3.0)), device)


def tunings(device: torch.device, *, smoke: bool) -> Iterator[Tuning]:
    """One for each size of heads and type of cache, measured with a full batch and with one long row."""
    for head_dim, fp8 in [(64, False)] if smoke else [(64, False), (64, True), (128, False), (128, True)]:
        shapes = [_Shape(2, 70, num_heads=4, num_kv_heads=2)] if smoke else [_Shape(64, 8192), _Shape(1, 65536)]
        inputs = [_inputs(shape._replace(head_dim=head_dim, fp8=fp8), device) for shape in shapes]
        dtypes = ("float8_e4m3fn",) if fp8 else ("bfloat16", "float16")
        configs: list[Config] = [
            {"BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
            for block_n, num_warps, num_stages in _CANDIDATES
        ]
        yield Tuning(
            name=f"decode_attention, {dtypes[0]}, heads of {head_dim}",
            op="decode_attention",
            shapes=[{"dtype": dtype, "max_head_dim": head_dim} for dtype in dtypes],
            current=tuned("decode_attention", dtype=dtypes[0], head_dim=head_dim),
            candidates=configs[:1] if smoke else configs,
            runs=[_run(each) for each in inputs],
            references=[partial(_reference, each) for each in inputs],
        )


def _inputs(shape: _Shape, device: torch.device, *, ragged: bool = False) -> _Inputs:
    num_rows, context, num_heads, num_kv_heads, head_dim, fp8, *_ = shape
    generator = torch.Generator(device).manual_seed(1)
    max_blocks = -(-context // _BLOCK_SIZE)
    num_blocks = num_rows * max_blocks
    cache = torch.empty(2, num_blocks, num_kv_heads, _BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=device)
    cache.normal_(generator=generator)
    scales = None
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
        scales = torch.rand(cache.shape[:-1], generator=generator, device=device)
    tables = torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32).view(num_rows, max_blocks)
    lengths = torch.full((num_rows,), context, dtype=torch.int32, device=device)
    if ragged:
        lengths = (torch.arange(1, num_rows + 1, device=device) * context // num_rows).to(torch.int32)
    q = torch.randn(num_rows, num_heads, head_dim, generator=generator, device=device).bfloat16()
    return _Inputs(shape, q, cache, scales, tables, lengths)


def _case(shape: _Shape, device: torch.device, *, ragged: bool = False) -> KernelCase:
    num_rows, context, num_heads, num_kv_heads, head_dim, fp8, *_ = shape
    inputs = _inputs(shape, device, ragged=ragged)
    tokens = int(inputs.lengths.clamp(max=shape.extras.window or context).sum())
    token_bytes = 2 * num_kv_heads * (head_dim * inputs.cache.element_size() + 4 * fp8)
    name = f"{num_rows} x {context}{' at most' if ragged else ''}, heads {num_heads}/{num_kv_heads} of {head_dim}"
    return KernelCase(
        name + (", fp8" if fp8 else "") + shape.extras.name,
        _run(inputs),
        partial(_reference, inputs),
        num_bytes=tokens * token_bytes + 2 * inputs.q.nbytes,
        num_flops=4 * tokens * num_heads * head_dim,
        target=shape.target,
    )


def _run(inputs: _Inputs) -> Callable[..., Tensor]:
    shape, q, cache, scales, tables, lengths = inputs
    device = q.device
    slots = torch.arange(shape.num_rows, dtype=torch.int32, device=device)
    order = torch.argsort(lengths, descending=True, stable=True).to(torch.int32)
    out, scale = torch.empty_like(q), shape.head_dim**-0.5
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    splits = num_splits(shape.num_rows, shape.num_kv_heads, num_processors, shape.context)
    scratch = SplitScratch(shape.num_rows * splits, shape.num_heads, shape.head_dim, device)
    parts = scratch.of_step(shape.num_rows, splits)
    options = shape.extras.options(shape.num_heads, device)

    def run(config: Config | None = None) -> Tensor:
        decode_attention(
            *(q, cache, scales, tables, slots, lengths, order),
            scale=scale,
            num_splits=splits,
            parts=parts,
            out_RHD=out,
            config=config,
            **options,
        )
        return out

    return run


def _reference(inputs: _Inputs) -> Tensor:
    return torch.stack([_attend(inputs, row) for row in range(inputs.shape.num_rows)])


def _attend(inputs: _Inputs, row: int) -> Tensor:
    """One row in float32: [H, D]."""
    blocks = inputs.tables[row].long()
    context = inputs.cache[:, blocks].float()
    if inputs.scales is not None:
        context *= inputs.scales[:, blocks][..., None]
    shape, length = inputs.shape, inputs.lengths[row]
    context = context.transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2)
    keys, values = context.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1)
    q, options = inputs.q[row].float()[:, None], shape.extras.options(shape.num_heads, inputs.q.device)
    return attention_reference(q, keys, values, length[None] - 1, scale=shape.head_dim**-0.5, **options)[:, 0]
