"""A model on a GPU with its KV cache, block tables and last tokens: the forward pass over the rows of a step.

Shapes: T tokens of the step, R rows, S of them whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.gpu.block_tables import cache_slots, write_blocks
from eventlm.models.config import check_runs_on_gpu, resolve_dtype, resolve_kv_dtype
from eventlm.models.decoder import Lap, no_lap
from eventlm.models.gpu_decoder import GpuDecoder, StepTokens
from eventlm.models.gpu_program import GpuProgram
from eventlm.models.gpu_weights import GpuWeights, load_gpu_weights
from eventlm.models.loader import torch_dtype
from eventlm.models.spec import why_not_plain
from eventlm.models.transformers_model import ServedModel
from eventlm.types import OnProgress, ceil_div
from eventlm.worker.gpu.attention import AttentionRows, Geometry
from eventlm.worker.gpu.attention_backends import choose_backend
from eventlm.worker.gpu.cache import GpuCache
from eventlm.worker.gpu.decode_graphs import DecodeGraphs
from eventlm.worker.gpu.device import Mark
from eventlm.worker.gpu.partial_weights import GpuPart
from eventlm.worker.gpu.staging import Staging
from eventlm.worker.gpu.step_inputs import Sampled, StepInputs, decode_views, most_numbers, put_decodes, stage_step
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.sequence_table import Row

#: An ended sequence is forgotten with a later launch: there may be so many times the sequences that run.
_SLOTS_PER_SEQUENCE = 2


class GpuForward:
    """Raises CheckpointError, and UsageError for a model or an attention backend that cannot be had on a GPU.

    `on_progress` gets the bytes of the weights. part: what a rank has of the model; None: all of it. Call
    `resize_cache` before the first step.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        model: ServedModel,
        device: torch.device,
        on_progress: OnProgress,
        part: GpuPart | None = None,
    ) -> None:
        whole = check_runs_on_gpu(model)
        self._setup, self._device = setup, device
        dtype_name = resolve_dtype(whole, setup.dtype, setup.quantization)
        #: Of the residual stream.
        self.dtype = dtype = torch_dtype(dtype_name)
        #: What is computed here: the model, or a smaller one.
        self.model = config = part.shard.model if part is not None else whole
        self.kv_dtype = resolve_kv_dtype(config, dtype_name, setup.kv_cache_dtype)
        self.vocab_size = whole.vocab_size
        geometry = Geometry(
            attentions=config.attentions,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=setup.block_size,
            max_rows=setup.max_num_seqs,
            max_context=setup.max_model_len,
            dtype=dtype,
            kv_dtype=self.kv_dtype,
            device=device,
            is_invariant=setup.batch_invariant,
        )
        choice = choose_backend(setup.attention_backend, geometry)
        self.host = {"attention_backend": choice.name, "attention_backend_reason": choice.reason}
        self._attention = choice.backend(geometry)
        weights = load_gpu_weights(
            setup.model,
            dtype=setup.dtype,
            device=device,
            is_invariant=setup.batch_invariant,
            part=part.shard.part if part is not None else None,
            make=part.make_weights if part is not None else GpuWeights,
            on_progress=on_progress,
        )
        self._decoder: GpuDecoder | GpuProgram = (
            GpuDecoder(weights, max_positions=setup.max_model_len, is_compiled=setup.torch_compile)
            if part is None and not why_not_plain(config)
            else GpuProgram(weights, max_positions=setup.max_model_len, dtype=dtype, device=device)
        )
        self.weight_bytes = self._decoder.weight_bytes()
        self.num_slots = _SLOTS_PER_SEQUENCE * setup.max_num_seqs * setup.decode_batches
        max_blocks = ceil_div(setup.max_model_len, setup.block_size)
        self.block_tables = torch.zeros(self.num_slots, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(self.num_slots, dtype=torch.int32, device=device)
        most = most_numbers(
            max_tokens=setup.max_num_batched_tokens,
            max_rows=setup.max_num_seqs,
            max_blocks=max_blocks,
            tile_queries=self._attention.tile_queries,
        )
        self.staging = Staging(most, setup.max_steps_in_flight + 1, device)
        self.cache = GpuCache(config, block_size=setup.block_size, dtype=dtype, kv_dtype=self.kv_dtype, device=device)
        self._graphs: DecodeGraphs | None = None

    def resize_cache(self, num_blocks: int) -> None:
        """Take the memory of so many KV blocks. What was there before is gone, graphs too. Raises CacheMemoryError."""
        self._graphs = None
        self.cache.resize(num_blocks)

    @property
    def can_capture(self) -> bool:
        """Whether there will be graphs, and not only what stands for them on a device without."""
        return self._device.type == "cuda" and self._attention.can_be_captured

    @torch.inference_mode()
    def capture(self, buckets: list[int], on_progress: OnProgress | None = None) -> int:
        """Capture the graphs of these sizes in place of those before; what they take of the memory in bytes."""
        self._graphs = None
        if not self._attention.can_be_captured:
            return 0
        self._graphs = DecodeGraphs(buckets, self._stage_padding, self._decode, self._device, on_progress)
        return self._graphs.num_bytes

    def _stage_padding(self, num_rows: int) -> None:
        """Where a step of so many decodes is read, have nothing but padding: what other steps left is no step."""
        self.staging.begin()
        nothing = np.empty(0, dtype=np.int32)
        put_decodes(self.staging, [], nothing, nothing, num_rows)
        self.staging.send()

    @torch.inference_mode()
    def compile_gain(self) -> str:
        """How long torch.compile took, and what it saves of a step with the most decodes."""
        num_rows, compiled = self._setup.max_num_seqs, self._decoder.compiled
        self._stage_padding(num_rows)
        started_ns = time.monotonic_ns()
        self._time_decode(num_rows, num_runs=1)
        compile_s = (time.monotonic_ns() - started_ns) / 1e9
        with_ms = self._time_decode(num_rows) / 1e6
        self._decoder.compiled = None
        without_ms = self._time_decode(num_rows) / 1e6
        self._decoder.compiled = compiled
        return (
            f"torch.compile took {compile_s:.1f} s; a step of {num_rows} decodes takes {with_ms:.2f} ms with it and "
            f"{without_ms:.2f} ms without"
        )

    def _time_decode(self, num_rows: int, num_runs: int = 5) -> int:
        """The shortest of some runs, in nanoseconds."""
        times = []
        for _ in range(num_runs):
            begun = Mark(self._device)
            self._decode(num_rows)
            ended = Mark(self._device)
            ended.wait()
            times.append(ended.ns_since(begun))
        return min(times)

    def stage(
        self,
        rows: list[Row],
        blocks: list[tuple[int, int, list[int]]],
        sampled: Sampled,
        *,
        num_decodes: int,
        bucket: int,
    ) -> StepInputs:
        """Write a step down; see `stage_step`."""
        attention = self._attention
        return stage_step(
            self.staging,
            rows,
            blocks,
            sampled,
            num_decodes=num_decodes,
            bucket=bucket if self._graphs is not None else 0,
            tile_queries=attention.tile_queries,
            tiles_decodes=attention.tiles_decodes,
        )

    def run(
        self,
        rows: list[Row],
        inputs: StepInputs,
        *,
        bucket: int,
        lap: Lap | None,
        residual_TH: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, [T, H], of a step that has been sent.

        Stores the keys and values of all rows. With a bucket the result is a graph's: the next step overwrites it.
        residual_TH: what it begins with, in a part of a model that has no embedding.
        """
        if len(inputs.updates):
            write_blocks(inputs.updates, len(inputs.updates), self.block_tables)
        if bucket and self._graphs is not None:
            if lap is None:
                return self._graphs(bucket)[: len(rows)]
            return self._decode(bucket, lap)[: len(rows)]
        step = AttentionRows(
            rows=rows,
            num_decodes=inputs.num_decodes,
            block_tables=self.block_tables,
            slots_R=inputs.slots,
            lengths_R=inputs.lengths,
            order_D=inputs.order,
            starts_R=inputs.starts,
            query_starts_R1=inputs.query_starts,
            tiles_N2=inputs.tiles,
        )
        return self._compute(inputs.tokens, inputs.positions, inputs.token_slots, step, lap or no_lap, residual_TH)

    def _decode(self, num_rows: int, lap: Lap = no_lap) -> Tensor:
        """A padded step that only decodes; how it is computed depends on its size alone."""
        tokens, positions, slots, lengths, order = decode_views(self.staging, num_rows)
        step = AttentionRows(
            rows=[],
            num_decodes=num_rows,
            block_tables=self.block_tables,
            slots_R=slots,
            lengths_R=lengths,
            order_D=order,
        )
        return self._compute(tokens, positions, slots, step, lap)

    def _compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        token_slots: Tensor,
        step: AttentionRows,
        lap: Lap,
        residual_TH: Tensor | None = None,
    ) -> Tensor:
        self._attention.begin(self.cache, step)
        slots_T = cache_slots(token_slots, positions, self.block_tables, self._setup.block_size)
        lap("prepare")
        step_tokens = StepTokens(tokens, positions, slots_T, residual_TH)
        return self._decoder.forward(step_tokens, self.last_tokens, self.cache, self._attention.attend, lap)

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of what `run` gave, [S, H]."""
        return self._decoder.norm(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] of what `run` gave."""
        return self._decoder.logits(hidden_SH)
