"""The forward pass of a worker's model over the rows of a step: compiled where that can be, else in torch.

Shapes: T tokens of the step, row after row, S of them whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderPeers, DecoderRow, KVLayers
from eventlm.kernels.cpu.native import library_hash
from eventlm.models.config import resolve_dtype, resolve_kv_dtype
from eventlm.models.cpu_kernels import choose_forward
from eventlm.models.decoder import Attention, Decoder, no_lap
from eventlm.models.loader import load_cpu_decoder, load_decoder, torch_dtype
from eventlm.models.rope import rope_tables
from eventlm.models.spec import AttentionSpec, ModelSpec
from eventlm.models.transformers_model import ServedModel, TransformersModel
from eventlm.models.weights.slices import ModelPart
from eventlm.system.processors import usable_cores
from eventlm.types import OnProgress
from eventlm.worker.batch import Batch, build_batch
from eventlm.worker.cache_engine import CacheEngine
from eventlm.worker.op_timer import OpTimer
from eventlm.worker.protocol import TORCH_BACKEND, WorkerSetup, backend_name
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.ranks.group_attention import GroupAttention, GroupBatch, build_group_batch
from eventlm.worker.ranks.kv_group import GroupStep, KVGroup
from eventlm.worker.ranks.partial_decoder import PartialDecoder
from eventlm.worker.ranks.shard import Shard
from eventlm.worker.sampling.row_extras import OutputLayer
from eventlm.worker.sampling.sampler import Draw, DrawNext
from eventlm.worker.sequence_table import Row
from eventlm.worker.state_cache import StateCache


class Forward(OutputLayer, Protocol):
    """A model with its KV cache, and the states of its layers that have any."""

    cache: CacheEngine
    #: For the header of a trace.
    host: dict[str, Any]
    #: How it draws tokens, if not in torch: from logits, and from what `run` gave.
    draw: Draw | None
    draw_next: DrawNext | None
    #: Of the residual stream.
    residual_dtype: torch.dtype
    #: Of the matrices by the operation that multiplies by them, all layers together.
    weight_bytes: dict[str, int]

    def run(
        self,
        rows: Seq[Row],
        timer: OpTimer | None,
        residual_TH: Tensor | None = None,
        step: GroupStep | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, [T, H]; stores the keys, values and states of all rows.

        residual_TH: what it begins with, in a part of a model that has no embedding. step: of several KV groups, what
        this one has of the step, whose rows are its own.
        """
        ...

    def lap(self, timer: OpTimer, name: str) -> None:
        """The operation `name` ends here, and had what the time since the lap before has not gone to by itself."""
        ...


def make_cache(setup: WorkerSetup, config: ServedModel) -> CacheEngine:
    """For the keys and values of either forward pass. Raises CacheMemoryError."""
    dtype = resolve_dtype(config, setup.dtype, setup.quantization)
    return CacheEngine(
        config,
        block_size=setup.block_size,
        num_blocks=setup.num_blocks,
        dtype=torch_dtype(dtype),
        kv_dtype=resolve_kv_dtype(config, dtype, setup.kv_cache_dtype),
        device=torch.device("cpu"),
    )


def make_forward(
    setup: WorkerSetup,
    config: ServedModel,
    cache: CacheEngine,
    on_progress: OnProgress | None = None,
    *,
    shards: Seq[Shard] = (),
    exchange: RankExchange | None = None,
    group: KVGroup | None = None,
) -> Forward:
    """Transformers' if it computes the model, else the one that `setup.cpu_kernels` names.

    `auto`: the fastest that can run this model on this machine. `on_progress` gets the bytes of the weights. shards: of
    all ranks, if there are several; all take the same forward pass. exchange: with the other tensor ranks. group: of
    several KV groups, the rank's own.

    Raises CheckpointError, CacheMemoryError if the states of sequences do not fit into memory, and UsageError if the
    one that it names cannot.
    """
    if isinstance(config, TransformersModel):
        # It takes seconds to load, and most models need none of it.
        from eventlm.worker.transformers_forward import TransformersForward

        return TransformersForward(setup, config, cache, on_progress)
    part = OwnPart(config, shards[setup.rank] if shards else None, exchange, group)
    states = StateCache(part.model, setup.state_slots)
    dtype = resolve_dtype(config, setup.dtype, setup.quantization)
    build, reason = "", ""
    for model in [shard.model for shard in shards] or [config]:
        build, reason = choose_forward(
            setup.cpu_kernels,
            model,
            model=setup.model,
            dtype=dtype,
            block_size=setup.block_size,
            quantization=setup.quantization,
        )
        if not build:
            break
    if build:
        return CpuForward(setup, part, cache, states, build, on_progress)
    if reason and dtype == "bfloat16":
        # The engine logs what a worker prints.
        print(f"the compiled forward pass is not used, torch's is several times slower: {reason}", file=sys.stderr)
    return TorchForward(setup, part, cache, states, on_progress)


class OwnPart(NamedTuple):
    """What a rank computes of a model. shard: None: all of it. exchange: with whom it adds up sums; None: nobody.
    group: what it has of contexts; None: all.
    """

    whole: ModelSpec
    shard: Shard | None
    exchange: RankExchange | None
    group: KVGroup | None = None

    @property
    def model(self) -> ModelSpec:
        """The smaller one."""
        return self.shard.model if self.shard is not None else self.whole

    @property
    def weights(self) -> ModelPart | None:
        """What is loaded of the checkpoint; None: all."""
        return self.shard.part if self.shard is not None else None

    @property
    def decoder_peers(self) -> DecoderPeers | None:
        """For a compiled decoder."""
        if self.exchange is None or self.shard is None:
            return None
        return DecoderPeers(self.exchange.group, self.shard.vocab_starts)

    def make_decoder(self, model: ModelSpec) -> Decoder:
        """One in torch's operations."""
        if self.exchange is None or self.shard is None:
            return Decoder(model)
        return PartialDecoder(self.shard, self.exchange.rank, self.exchange.gather)


def step_token_ids(rows: Seq[Row]) -> list[int]:
    """The tokens of all rows, one row after the other."""
    token_ids: list[int] = []
    for row in rows:
        if row.num_tokens == 1:
            token_ids.append(row.sequence.token_ids[row.start])
        else:
            token_ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
    return token_ids


class CpuForward:
    """`eventlm.kernels.cpu`, in bfloat16."""

    residual_dtype = torch.float32

    def __init__(
        self,
        setup: WorkerSetup,
        part: OwnPart,
        cache: CacheEngine,
        states: StateCache,
        build: str,
        on_progress: OnProgress | None,
    ) -> None:
        self.cache = cache
        self.states = states
        self._kv = KVLayers(cache.layers)
        self.host = {"attention_backend": backend_name(build), "kernel_library": library_hash(build)}
        self.vocab_size = part.whole.vocab_size
        num_threads = setup.threads or usable_cores()
        self._decoder: CpuDecoder = load_cpu_decoder(
            setup.model,
            build,
            quantization=setup.quantization,
            max_positions=setup.max_model_len,
            num_threads=num_threads,
            part=part.weights,
            peers=part.decoder_peers,
            sharers=part.group.sharers if part.group is not None else None,
            on_progress=on_progress,
        )
        if setup.processors:
            self._decoder.pin(setup.processors)
        self.draw: Draw | None = self._decoder.draw
        self.draw_next: DrawNext | None = self._decoder.draw_next
        self.weight_bytes = self._decoder.weight_bytes
        #: At the last lap.
        self._times_ns = self._decoder.times_ns()

    def run(
        self,
        rows: Seq[Row],
        timer: OpTimer | None,
        residual_TH: Tensor | None = None,
        step: GroupStep | None = None,
    ) -> Tensor:
        token_ids_T = step_token_ids(rows)
        if step is None:
            num_shared = 0
            steps = [DecoderRow(row.start, row.num_tokens, row.sequence.block_table) for row in rows]
        else:
            num_shared = step.num_shared
            steps = [
                DecoderRow(each.row.start, each.row.num_tokens, each.blocks, each.first_shard, each.first_shared)
                for each in step.own
            ]
        states = self.states.step(rows)
        hidden_TH = self._decoder.forward(token_ids_T, steps, self._kv, states, residual_TH, num_shared)
        if timer:
            self.lap(timer, "prepare")
        return hidden_TH

    def lap(self, timer: OpTimer, name: str) -> None:
        before, self._times_ns = self._times_ns, self._decoder.times_ns()
        spent = {part: self._times_ns[part] - before[part] for part in before if self._times_ns[part] > before[part]}
        timer.share(spent, rest=name)

    def norm(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.norm(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_SH)


class TorchForward:
    """The decoder in torch's operations, any dtype."""

    host = {"attention_backend": TORCH_BACKEND}
    draw: Draw | None = None
    draw_next: DrawNext | None = None

    def __init__(
        self,
        setup: WorkerSetup,
        part: OwnPart,
        cache: CacheEngine,
        states: StateCache,
        on_progress: OnProgress | None,
    ) -> None:
        self.cache = cache
        self.states = states
        self.residual_dtype = dtype = torch_dtype(resolve_dtype(part.whole, setup.dtype, setup.quantization))
        self.vocab_size = part.whole.vocab_size
        self._block_size = setup.block_size
        self._device = torch.device("cpu")
        self._group = part.group
        self._hidden_size = part.whole.hidden_size
        self._attentions = {
            number: each for number, each in part.model.attentions.items() if isinstance(each, AttentionSpec)
        }
        self._decoder = load_decoder(
            setup.model,
            dtype=setup.dtype,
            quantization=setup.quantization,
            part=part.weights,
            make=part.make_decoder,
            on_progress=on_progress,
        )
        self.weight_bytes = self._decoder.weight_bytes()
        self._ropes = rope_tables(part.model, setup.max_model_len, dtype=dtype, device=self._device)

    def run(
        self,
        rows: Seq[Row],
        timer: OpTimer | None,
        residual_TH: Tensor | None = None,
        step: GroupStep | None = None,
    ) -> Tensor:
        batch: Batch | GroupBatch
        attention: Attention
        if step is None or self._group is None:
            batch = build_batch(rows, block_size=self._block_size, device=self._device)
            attention = self.cache.attention(batch.slots_T, batch.attention_rows, self._decoder.sinks)
        else:
            batch = build_group_batch(step, self._block_size)
            attention = own = GroupAttention(
                self._group, self.cache, batch, step.num_shared, self._attentions, self._decoder.sinks
            )
            if not rows:
                own.take_part()
                return torch.empty(0, self._hidden_size, dtype=self.residual_dtype)
        self.cache.clear_slots(batch.tails_R)
        lap = timer.lap if timer else no_lap
        lap("prepare")
        states = self.states.step(rows)
        return self._decoder.forward(
            batch.token_ids_T,
            batch.positions_T,
            self._ropes,
            attention,
            lap,
            states=states,
            residual_TH=residual_TH,
        )

    def lap(self, timer: OpTimer, name: str) -> None:
        timer.lap(name)

    def norm(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.norm(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_SH)
