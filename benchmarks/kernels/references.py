"""What the kernels for GPUs compute, in torch's operations."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from eventlm.kernels.kv_quantization import SCALE_BYTES, quantize


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension of any x, rounded where the kernel rounds."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalized.to(x.dtype) * weight


def add_rms_norm_reference(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> None:
    residual_TH += x_TH
    x_TH.copy_(rms_norm_reference(residual_TH, weight_H, eps))


def qkv_store_reference(
    qkv_TN: Tensor,
    positions_T: Tensor,
    cache_slots_T: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    num_heads: int,
) -> None:
    rows = (cache_slots_T >= 0).nonzero()[:, 0]
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = qkv_TN[rows].unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight_D is not None:
        q = rms_norm_reference(q, q_weight_D, eps)
    if k_weight_D is not None:
        k = rms_norm_reference(k, k_weight_D, eps)
    cos, sin = cos_PD2[positions_T[rows]].unsqueeze(1), sin_PD2[positions_T[rows]].unsqueeze(1)
    qkv_TN[rows, : num_heads * head_dim] = _rotated_reference(q, cos, sin).flatten(1)
    blocks, indices = cache_slots_T[rows] // block_size, cache_slots_T[rows] % block_size
    for part, new in enumerate((_rotated_reference(k, cos, sin), v)):
        if kv_scales is None:
            kv_cache[part, blocks, :, indices] = new
            continue
        elements, scales = quantize(new, torch.uint8).split((head_dim, SCALE_BYTES), dim=-1)
        kv_cache.view(torch.uint8)[part, blocks, :, indices] = elements
        kv_scales[part, blocks, :, indices] = scales.contiguous().view(torch.float32)[..., 0]


def _rotated_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def embed_tokens_reference(staged_T: Tensor, last_tokens_S: Tensor, embedding_VH: Tensor, out_TH: Tensor) -> None:
    token_ids_T = staged_T.clone()
    from_slots = staged_T < 0
    token_ids_T[from_slots] = last_tokens_S[-staged_T[from_slots] - 1].clamp(min=0)
    out_TH.copy_(embedding_VH[token_ids_T])


def grouped_gemm_reference(
    x_TK: Tensor, weight_ENK: Tensor, offsets_E1: Tensor, *, max_rows: int, out_TN: Tensor | None = None
) -> Tensor:
    """One expert after the other; `max_rows` is not needed here."""
    out = x_TK.new_empty((x_TK.shape[0], weight_ENK.shape[1])) if out_TN is None else out_TN
    offsets = offsets_E1.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(offsets)):
        out[start:end] = x_TK[start:end] @ weight_ENK[expert].T
    return out


def merge_attention_reference(
    partial_RHSD: Tensor, lse_RHS: Tensor, out_RHD: Tensor, lse_RH: Tensor | None = None
) -> None:
    """In float64."""
    lse = lse_RHS.double()
    parts = partial_RHSD.double().masked_fill(lse.isneginf()[..., None], 0)
    merged = torch.logsumexp(lse, -1)
    weights = torch.exp(lse - torch.where(merged.isneginf(), 0, merged)[..., None])
    out_RHD.copy_((parts * weights[..., None]).sum(-2))
    if lse_RH is not None:
        lse_RH.copy_(merged)


def cache_slots_reference(token_slots_T: Tensor, positions_T: Tensor, block_tables: Tensor, block_size: int) -> Tensor:
    positions = positions_T.long()
    blocks = block_tables.long()[token_slots_T.clamp(min=0).long(), positions // block_size]
    return torch.where(token_slots_T >= 0, blocks * block_size + positions % block_size, -1)


def write_blocks_reference(updates_U3: Tensor, num_updates: int, block_tables: Tensor) -> None:
    slots, indices, blocks = updates_U3[:num_updates].unbind(1)
    block_tables[slots, indices] = blocks
