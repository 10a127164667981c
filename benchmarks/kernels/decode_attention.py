"""Decode attention: one new token a row over its paged context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.case import KernelCase
from eventlm.kernels.gpu.decode_attention import decode_attention, num_splits, split_scratch

_BLOCK_SIZE = 16


class _Shape(NamedTuple):
    num_rows: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    fp8: bool = False
    target: float = 0.0


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """The rows of a batch have all the same context, but for the ragged one."""
    if smoke:
        yield _case(_Shape(2, 70, num_heads=4, num_kv_heads=2, head_dim=64), device)
        yield _case(_Shape(2, 70, num_heads=4, num_kv_heads=2, head_dim=64, fp8=True), device)
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


def _case(shape: _Shape, device: torch.device, *, ragged: bool = False) -> KernelCase:
    num_rows, context, num_heads, num_kv_heads, head_dim, fp8, target = shape
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
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    lengths = torch.full((num_rows,), context, dtype=torch.int32, device=device)
    if ragged:
        lengths = (torch.arange(1, num_rows + 1, device=device) * context // num_rows).to(torch.int32)
    q = torch.randn(num_rows, num_heads, head_dim, generator=generator, device=device).bfloat16()
    out, scale = torch.empty_like(q), head_dim**-0.5
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    splits = num_splits(num_rows, num_kv_heads, num_processors, context)
    scratch = split_scratch(num_rows, num_heads, splits, head_dim, device)

    def run() -> Tensor:
        decode_attention(
            q, cache, scales, tables, slots, lengths, scale=scale, num_splits=splits, scratch=scratch, out_RHD=out
        )
        return out

    def reference() -> Tensor:
        return torch.stack(
            [_attend(q[row], cache, scales, tables[row], int(lengths[row]), scale) for row in range(num_rows)]
        )

    tokens = int(lengths.sum())
    token_bytes = 2 * num_kv_heads * (head_dim * cache.element_size() + 4 * fp8)
    name = f"{num_rows} x {context}{' at most' if ragged else ''}, heads {num_heads}/{num_kv_heads} of {head_dim}"
    return KernelCase(
        name + (", fp8" if fp8 else ""),
        run,
        reference,
        num_bytes=tokens * token_bytes + 2 * q.nbytes,
        num_flops=4 * tokens * num_heads * head_dim,
        target=target,
    )


def _attend(q: Tensor, cache: Tensor, scales: Tensor | None, table: Tensor, length: int, scale: float) -> Tensor:
    """One row in float32: q [H, D]."""
    context = cache[:, table.long()].float()
    if scales is not None:
        context *= scales[:, table.long()][..., None]
    keys, values = context.transpose(2, 3).flatten(1, 2)[:, :length].transpose(1, 2)
    out: Tensor = scaled_dot_product_attention(
        q.float()[None, :, None], keys[None], values[None], scale=scale, enable_gqa=True
    )
    return out[0, :, 0]
