"""The forward pass of a worker's model over the rows of a step: compiled where that can be, else in torch.

Shapes: T tokens of the step, row after row, S of them whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eventlm.cores import usable_cores
from eventlm.errors import UsageError
from eventlm.kernels.cpu.decoder import CpuDecoder, StepRow, unsupported
from eventlm.models.config import DecoderConfig, resolve_dtype
from eventlm.models.cpu_kernels import AUTO, TORCH, choose_build
from eventlm.models.decoder import no_lap
from eventlm.models.loader import load_cpu_decoder, load_decoder, native_shape, torch_dtype
from eventlm.models.rope import RopeTable
from eventlm.worker.batch import build_batch
from eventlm.worker.cache_engine import CacheEngine
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.protocol import TORCH_BACKEND, WorkerSetup, backend_name
from eventlm.worker.sampler import Draw
from eventlm.worker.sequence_table import Row


class Forward(Protocol):
    """A model with its KV cache."""

    cache: CacheEngine
    #: What a trace says of it.
    name: str
    vocab_size: int
    #: How it draws tokens, if not in torch.
    draw: Draw | None

    def run(self, rows: Seq[Row], timer: OpTimer | None) -> Tensor:
        """The residual stream behind the last layer, [T, H]; stores the keys and values of all rows."""
        ...

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of what `run` gave, [S, H]."""
        ...

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] of what `run` gave."""
        ...


def make_forward(setup: WorkerSetup, config: DecoderConfig) -> Forward:
    """The one that `setup.cpu_kernels` names; `auto`: the fastest that can run this model on this machine.

    Raises CheckpointError, CacheMemoryError, and UsageError if the one that it names cannot.
    """
    dtype = resolve_dtype(config, setup.dtype)
    build = choose_build(setup.cpu_kernels)
    if setup.cpu_kernels == TORCH:
        return TorchForward(setup, config)
    if dtype != "bfloat16":
        reason = f"it computes in bfloat16, not {dtype}"
    elif not build:
        reason = "it was not compiled, or not for this processor"
    else:
        reason = unsupported(native_shape(config, setup.max_model_len), setup.block_size)
    if not reason:
        return CpuForward(setup, config, build)
    if setup.cpu_kernels != AUTO:
        raise UsageError(f"--cpu-kernels {setup.cpu_kernels} cannot run {setup.model}: {reason}; use {AUTO} or {TORCH}")
    if dtype == "bfloat16":
        # The engine puts what a worker says into its log.
        print(f"the compiled forward pass is not used, torch's is several times slower: {reason}", file=sys.stderr)
    return TorchForward(setup, config)


class CpuForward:
    """`eventlm.kernels.cpu`, in bfloat16."""

    def __init__(self, setup: WorkerSetup, config: DecoderConfig, build: str) -> None:
        self.name = backend_name(build)
        self.vocab_size = config.vocab_size
        num_threads = setup.threads or usable_cores()
        self._decoder: CpuDecoder = load_cpu_decoder(
            setup.model, build, max_positions=setup.max_model_len, num_threads=num_threads
        )
        self.draw: Draw | None = self._decoder.draw
        self.cache = _make_cache(setup, config, torch.bfloat16)

    def run(self, rows: Seq[Row], timer: OpTimer | None) -> Tensor:
        token_ids: list[int] = []
        for row in rows:
            token_ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        # Copies: an array that lends its memory cannot grow.
        steps = [StepRow(row.start, row.num_tokens, np.array(row.sequence.block_table, dtype=np.int32)) for row in rows]
        before = self._decoder.times_ns() if timer else {}
        if timer:
            timer.lap("prepare")
        hidden_TH = self._decoder.forward(np.array(token_ids, dtype=np.int32), steps, self.cache.kv)
        if timer:
            after = self._decoder.times_ns()
            spent = {part: after[part] - before[part] for part in after if after[part] > before[part]}
            timer.share(spent, rest="prepare")
        return hidden_TH

    def norm(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.norm(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_SH)


class TorchForward:
    """The decoder in torch's operations, any dtype."""

    name = TORCH_BACKEND
    draw: Draw | None = None

    def __init__(self, setup: WorkerSetup, config: DecoderConfig) -> None:
        dtype = torch_dtype(resolve_dtype(config, setup.dtype))
        self.vocab_size = config.vocab_size
        self._block_size = setup.block_size
        self._device = torch.device("cpu")
        self._decoder = load_decoder(setup.model, dtype=setup.dtype, device=self._device.type)
        self._rope = RopeTable(config, setup.max_model_len, dtype=dtype, device=self._device)
        self.cache = _make_cache(setup, config, dtype)

    def run(self, rows: Seq[Row], timer: OpTimer | None) -> Tensor:
        batch = build_batch(rows, block_size=self._block_size, device=self._device)
        self.cache.clear_slots(batch.tails_R)
        attention = self.cache.attention(batch.slots_T, batch.attention_rows)
        lap = timer.lap if timer else no_lap
        lap("prepare")
        return self._decoder.forward(batch.token_ids_T, batch.positions_T, self._rope, attention, lap)

    def norm(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.norm.forward(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_SH)


def _make_cache(setup: WorkerSetup, config: DecoderConfig, dtype: torch.dtype) -> CacheEngine:
    return CacheEngine(
        config, block_size=setup.block_size, num_blocks=setup.num_blocks, dtype=dtype, device=torch.device("cpu")
    )
