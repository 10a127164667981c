"""Attention over keys and values in blocks, compiled (paged_attention.h): for models whose other operations torch
computes.

Shapes: T tokens of the step, H query heads, K key-value heads, D elements of a query and a key, E of a value.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_int32
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.kernels.cpu.decoder import DecoderRow, KVLayers
from eventlm.kernels.cpu.native import library
from eventlm.kernels.cpu.products import Products


class LayerAttention(NamedTuple):
    """What a layer attends with. `head_dim`: what its keys and values have in the cache, where zeros follow D or E.

    window: tokens that a query sees; 0: all before it.
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    head_dim: int
    window: int = 0


class _NativeLayer(ctypes.Structure):
    _fields_ = tuple((name, c_int32) for name in LayerAttention._fields)


class CompiledAttention:
    """By the threads of `products`, for one caller at a time. MemoryError if there is no room for what it works on."""

    def __init__(self, build: str, products: Products, kv: KVLayers, layers: Sequence[LayerAttention]) -> None:
        self._functions = library(build)
        self._handle = self._functions.eventlm_attention(products.handle)
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._functions.eventlm_free_attention, self._handle)
        self._products, self._kv = products, kv
        self._layers = [_NativeLayer(*layer) for layer in layers]
        self._tables: Sequence[array[int]] = ()

    def begin(self, rows: Sequence[DecoderRow]) -> None:
        """The rows of a step, whose tokens lie one row after the other in the calls that follow."""
        starts, counts, self._tables, *_ = zip(*rows, strict=True)
        numbers = array("i", starts), array("i", counts)
        addresses = array("Q", [table.buffer_info()[0] for table in self._tables])
        self._functions.eventlm_begin_attention(
            self._handle, len(rows), *(values.buffer_info()[0] for values in (*numbers, addresses))
        )

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTE: Tensor,
        *,
        scale: float,
        soft_cap: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Store keys and values, then attend: [T, H, E], in the dtype of the queries.

        scale, soft_cap, sinks_H: as `eventlm.kernels.paged_attention` has them.
        """
        native, kv = self._layers[layer], self._kv
        q, k, v = _readable(q_HTD), _readable(k_KTD), _readable(v_KTE)
        strides = array("q", (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]))
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        out_THE = torch.empty((q_HTD.shape[1], native.num_heads, native.value_size), dtype=torch.bfloat16)
        self._functions.eventlm_attend(
            self._handle,
            ctypes.byref(native),
            kv.addresses[layer],
            kv.format,
            kv.num_blocks,
            kv.block_size,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            strides.buffer_info()[0],
            scale,
            soft_cap,
            None if sinks is None else sinks.data_ptr(),
            out_THE.data_ptr(),
        )
        return out_THE if q is q_HTD else out_THE.to(q_HTD.dtype)


def _readable(x: Tensor) -> Tensor:
    """In bfloat16, with the elements of each head one after the other."""
    if x.dtype is not torch.bfloat16:
        x = x.to(torch.bfloat16)
    return x if x.stride(-1) == 1 else x.contiguous()
