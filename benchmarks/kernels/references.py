"""What the kernels for GPUs compute, in torch's operations."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventlm.kernels.gpu.code_types import UNIT
from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.kernels.kv_quantization import SCALE_BYTES, quantize


class AttentionExtras(NamedTuple):
    """What a case of attention has beside keys and values; as the kernels take it."""

    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def name(self) -> str:
        """For the end of a case's name; empty without extras."""
        window = f", window {self.window}" if self.window else ""
        return window + (", soft cap" if self.soft_cap else "") + (", sinks" if self.has_sinks else "")

    def options(self, num_heads: int, device: torch.device) -> dict[str, Any]:
        """The kernels' keywords."""
        sinks = torch.linspace(-1.0, 4.0, num_heads, device=device) if self.has_sinks else None
        return {"window": self.window, "soft_cap": self.soft_cap, "sinks_H": sinks}


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
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv_TN[rows].unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight_D is not None:
        q = rms_norm_reference(q, q_weight_D, eps)
    if k_weight_D is not None:
        k = rms_norm_reference(k, k_weight_D, eps)
    cos, sin = cos_PD2[positions_T[rows]].unsqueeze(1), sin_PD2[positions_T[rows]].unsqueeze(1)
    qkv_TN[rows, : num_heads * head_dim] = _rotated_reference(q, cos, sin).flatten(1)
    store_heads_reference(_rotated_reference(k, cos, sin), v, cache_slots_T[rows], kv_cache, kv_scales)


def store_heads_reference(
    k_TKD: Tensor, v_TKD: Tensor, cache_slots_T: Tensor, kv_cache: Tensor, kv_scales: Tensor | None
) -> None:
    """All tokens have a slot."""
    block_size, head_dim = kv_cache.shape[3:]
    blocks, indices = cache_slots_T // block_size, cache_slots_T % block_size
    for part, new in enumerate((k_TKD, v_TKD)):
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


def packed_values(weight: PackedWeight) -> Tensor:
    """The numbers of a matrix or of experts' matrices, float32 [.., N, K]."""
    codes, scales, shifts, code_type, num_in = weight
    if code_type.bits == 4:
        units = codes.unflatten(-1, (-1, UNIT // 2))
        codes = torch.cat((units & 15, units >> 4), dim=-1).flatten(-2)[..., :num_in]

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(code_type.group, dim=-1)[..., :num_in]

    if code_type.is_float:
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
        return torch.cat((sizes, -sizes))[codes.long()] * spread(scales)
    if shifts is None:
        return (codes.float() - (1 << (code_type.bits - 1))) * spread(scales)
    if code_type.shift == "added":
        return codes.float() * spread(scales) + spread(shifts)
    return (codes.float() - spread(shifts)) * spread(scales)


def attention_reference(
    q_HND: Tensor,
    keys_HLD: Tensor,
    values_HLD: Tensor,
    positions_N: Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """Causal attention of queries at these positions, [H, N, D]."""
    scores = q_HND @ keys_HLD.transpose(1, 2) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    indices_L = torch.arange(keys_HLD.shape[1], device=q_HND.device)
    visible = indices_L <= positions_N[:, None]
    if window:
        visible &= indices_L > positions_N[:, None] - window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H[:, None, None].expand(-1, len(positions_N), 1)), dim=-1)
    return scores.softmax(-1)[..., : len(indices_L)] @ values_HLD


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
