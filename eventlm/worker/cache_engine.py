"""The keys and values of all sequences on a worker, in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.errors import EventLMError
from eventlm.kernels import host_memory
from eventlm.kernels.kv_quantization import SCALE_BYTES, STORED_DTYPES
from eventlm.kernels.kv_store import head_slots, kv_store
from eventlm.kernels.paged_attention import AttentionGroup, AttentionRow, paged_attention, plan_attention
from eventlm.models.config import kv_bytes_per_token
from eventlm.models.spec import AttentionSpec, KVShape
from eventlm.models.transformers_model import AttentionCall, ServedModel


class CacheMemoryError(EventLMError):
    """The KV cache does not fit into memory."""


class _Plan(NamedTuple):
    """Of a step, for the layers of one shape: where keys and values go, and who attends."""

    slots: Tensor
    groups: list[AttentionGroup]


class CacheEngine:
    """Each layer's keys and values, a tensor [2, num_blocks, kv_heads, block_size, W], keys first.

    W is head_dim, or for `kv_dtype` int8 and fp8 the bytes of `eventlm.kernels.kv_quantization`. dtype: of queries.
    Blocks have the same numbers in all layers.
    """

    def __init__(
        self,
        config: ServedModel,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        scale_bytes = SCALE_BYTES if kv_dtype in STORED_DTYPES else 0
        shapes = [
            None if kv is None else (2, num_blocks, kv.num_heads, block_size, kv.head_dim + scale_bytes)
            for kv in config.kv_shapes
        ]
        sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
        try:
            #: All layers', one after the other.
            self.kv = _zeros((sum(sizes),), STORED_DTYPES.get(kv_dtype) or getattr(torch, kv_dtype), device)
        except (RuntimeError, MemoryError, ValueError) as error:
            mebibytes = num_blocks * block_size * kv_bytes_per_token(config, kv_dtype) >> 20
            raise CacheMemoryError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens needs {mebibytes:,} MiB, "
                "more than this machine gives; lower --num-blocks or --kv-memory"
            ) from error
        #: What each layer attends to; None: nothing.
        self.layers: list[Tensor | None] = [
            None if shape is None else piece.view(shape)
            for shape, piece in zip(shapes, self.kv.split(sizes), strict=True)
        ]
        #: Of those that store something.
        self.stored = [layer for layer in self.layers if layer is not None]
        for number, attention in config.attentions.items():
            if isinstance(attention, AttentionSpec) and attention.keys_of >= 0:
                self.layers[number] = self.layers[attention.keys_of]
        self._dtype, self._block_size = dtype, block_size
        self._num_tokens = num_blocks * block_size
        self._attentions = config.attentions

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take in all layers."""
        return self.kv.nbytes // self._num_tokens

    def attention(self, slots_T: Tensor, rows: Sequence[AttentionRow], sinks: Sequence[Tensor | None]) -> StepAttention:
        """The attention of one step, whose tokens' keys and values go into `slots_T`. sinks: see `Decoder.sinks`."""
        plans: dict[KVShape, _Plan] = {}
        for number, attention in self._attentions.items():
            layer, shape = self.layers[number], attention.kv_shape
            if layer is not None and shape not in plans:
                slots = head_slots(slots_T, block_size=self._block_size, num_kv_heads=shape.num_heads)
                windows = {each.window for each in self._attentions.values() if each.kv_shape == shape}
                plans[shape] = _Plan(slots, plan_attention(rows, layer, self._dtype, sorted(windows)))
        layers = {number: layer for number, layer in enumerate(self.layers) if layer is not None}
        return StepAttention(layers, plans, self._attentions, sinks)

    def clear_slots(self, slots_R: Tensor) -> None:
        """Zero these slots, int64, in all layers.

        Attention reads whole blocks and masks what is after a sequence's end, but 0 x NaN is NaN: a block must not hold
        values that overflowed in a sequence that had it before.
        """
        if not slots_R.numel():
            return
        slots: dict[int, Tensor] = {}
        for layer in self.stored:
            num_heads = layer.shape[2]
            if num_heads not in slots:
                slots[num_heads] = head_slots(slots_R, block_size=self._block_size, num_kv_heads=num_heads)
            layer.flatten(1, 3).index_fill_(1, slots[num_heads], 0)

    def clear(self, num_blocks: int) -> None:
        """Zero the first `num_blocks` blocks."""
        for layer in self.stored:
            layer[:, :num_blocks].zero_()


class StepAttention:
    """Called by each layer of the decoder: stores the step's keys and values, all rows', then attends.

    A layer without any attends to those of an earlier one.
    """

    def __init__(
        self,
        layers: Mapping[int, Tensor],
        plans: Mapping[KVShape, _Plan],
        attentions: Mapping[int, AttentionSpec | AttentionCall],
        sinks: Sequence[Tensor | None],
    ) -> None:
        self._layers = layers
        self._plans = plans
        self._attentions = attentions
        self._sinks = sinks

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
        spec = self._attentions[layer]
        assert isinstance(spec, AttentionSpec)
        return self.attend(
            layer, q_THD, k_TKD, v_TKD, scale=spec.scale, soft_cap=spec.soft_cap, sinks_H=self._sinks[layer]
        )

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKD: Tensor | None,
        *,
        scale: float,
        soft_cap: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """The same where the layer is not described: scale, soft_cap and sinks as `paged_attention` takes them."""
        kv_cache, attention = self._layers[layer], self._attentions[layer]
        plan = self._plans[attention.kv_shape]
        if k_TKD is not None and v_TKD is not None:
            kv_store(kv_cache, k_TKD, v_TKD, plan.slots)
        return paged_attention(
            q_THD,
            kv_cache,
            plan.groups,
            scale=scale,
            window=attention.window,
            soft_cap=soft_cap,
            sinks_H=sinks_H,
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: padding reads slots that were never written, and 0 x NaN would be NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return host_memory.zeros(shape, dtype)
