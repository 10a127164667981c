"""A Llama or Qwen3 decoder whose forward pass is compiled (decoder.h), with its packed weights.

Shapes: T tokens of a step, R rows, S rows whose logits are wanted, V vocabulary, H hidden size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.cpu.native import NativeShape, library

#: In the order of decoder.h's Weight.
WEIGHTS = (
    *("embedding", "lm_head", "final_norm", "input_norm", "post_attention_norm"),
    *("query", "key", "value", "output", "gate", "up", "down", "query_norm", "key_norm"),
    *("query_bias", "key_bias", "value_bias", "output_bias", "gate_bias", "up_bias", "down_bias"),
)
_NUMBERS = {name: number for number, name in enumerate(WEIGHTS)}
#: In the order of decoder.h's Part.
PARTS = (
    *("embed", "norm", "qkv_proj", "rotary", "attention"),
    *("o_proj", "gate_up_proj", "down_proj", "lm_head", "sample"),
)
#: Tokens of a sub-block of the cache; a block holds whole ones.
SUB_BLOCK = 16
_LANES = 16
_MAX_HEAD_DIM = 256
_MAX_GROUP = 32


class StepRow(NamedTuple):
    """`num_tokens` tokens behind `start` others of a sequence with the blocks `block_table`, int32."""

    start: int
    num_tokens: int
    block_table: np.ndarray


def unsupported(shape: NativeShape, block_size: int) -> str:
    """Why the compiled decoder cannot run a model of this shape; empty if it can."""
    group = shape.num_heads // shape.num_kv_heads
    if shape.head_dim % _LANES or shape.head_dim > _MAX_HEAD_DIM:
        return f"heads of {shape.head_dim} are not a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    if shape.hidden_size % _LANES:
        return f"a hidden size of {shape.hidden_size} is not a multiple of {_LANES}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key"
    if block_size % SUB_BLOCK:
        return f"blocks of {block_size} tokens are not a multiple of {SUB_BLOCK}"
    return ""


class CpuDecoder:
    """Weights are given one by one, then it runs. cosines, sines: float32 [max_positions, head_dim / 2].

    MemoryError if the packed weights find no room, or the threads.
    """

    def __init__(self, build: str, shape: NativeShape, cosines: Tensor, sines: Tensor, *, num_threads: int) -> None:
        self._functions = library(build)
        self._shape = shape
        cosines, sines = cosines.float().contiguous(), sines.float().contiguous()
        self._handle = self._functions.eventlm_decoder(
            ctypes.byref(shape), cosines.data_ptr(), sines.data_ptr(), num_threads
        )
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._functions.eventlm_free, self._handle)
        #: Read from where it lies.
        self._embedding: Tensor | None = None

    def load(self, name: str, layer: int, values: Tensor) -> None:
        """One of WEIGHTS, matrices as [out, in]."""
        if values.dim() == 1:
            vector = values.float().contiguous()
            self._functions.eventlm_load_vector(self._handle, _NUMBERS[name], layer, vector.data_ptr())
            return
        matrix = values.to(torch.bfloat16).contiguous()
        if name == "embedding" and not self._shape.is_tied:
            self._embedding = matrix
        self._functions.eventlm_load_matrix(self._handle, _NUMBERS[name], layer, matrix.data_ptr())

    def forward(self, token_ids_T: np.ndarray, rows: Sequence[StepRow], kv: Tensor) -> Tensor:
        """The residual stream behind the last layer, float32 [T, H]; stores the rows' keys and values.

        token_ids_T: the rows' tokens, one row after the other, int32. kv: bfloat16 [layers, 2, blocks, key-value
        heads, block size, head_dim]; only this decoder knows how it lays out what it stores there.
        """
        _, _, num_blocks, _, block_size, _ = kv.shape
        places_R = np.cumsum([0, *(len(row.block_table) for row in rows[:-1])], dtype=np.int32)
        starts_R = np.array([row.start for row in rows], dtype=np.int32)
        counts_R = np.array([row.num_tokens for row in rows], dtype=np.int32)
        blocks = np.concatenate([row.block_table for row in rows])
        hidden_TH = torch.empty(len(token_ids_T), self._shape.hidden_size)
        self._functions.eventlm_forward(
            self._handle,
            token_ids_T.ctypes.data,
            len(rows),
            *(array.ctypes.data for array in (starts_R, counts_R, places_R, blocks)),
            kv.data_ptr(),
            num_blocks,
            block_size,
            hidden_TH.data_ptr(),
        )
        return hidden_TH

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of what `forward` gave for these tokens, float32 [S, H]."""
        hidden_SH = hidden_SH.contiguous()
        normed_SH = torch.empty_like(hidden_SH)
        self._functions.eventlm_norm(self._handle, hidden_SH.data_ptr(), len(hidden_SH), normed_SH.data_ptr())
        return normed_SH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits, float32 [S, V], of what `forward` gave for these tokens."""
        hidden_SH = hidden_SH.contiguous()
        logits_SV = torch.empty(len(hidden_SH), self._shape.vocab_size)
        self._functions.eventlm_logits(self._handle, hidden_SH.data_ptr(), len(hidden_SH), logits_SV.data_ptr())
        return logits_SV

    def draw(self, logits_SV: Tensor, temperatures_S: np.ndarray, keys_S2: Tensor) -> Tensor:
        """One token id a row, int32 [S], greedily where the temperature is 0, else with the noise of the row's keys.

        logits_SV: float32. temperatures_S: float32. keys_S2: int32, see `eventlm.worker.noise.noise_keys`.
        """
        logits_SV, keys_S2 = logits_SV.contiguous(), keys_S2.contiguous()
        temperatures_S = np.ascontiguousarray(temperatures_S, dtype=np.float32)
        ids_S = torch.empty(len(logits_SV), dtype=torch.int32)
        self._functions.eventlm_draw(
            self._handle,
            logits_SV.data_ptr(),
            len(logits_SV),
            temperatures_S.ctypes.data,
            keys_S2.data_ptr(),
            ids_S.data_ptr(),
        )
        return ids_S

    def times_ns(self) -> dict[str, int]:
        """Time since the start by part of the forward pass."""
        times = self._functions.eventlm_times(self._handle)
        return {name: times[number] for number, name in enumerate(PARTS)}
