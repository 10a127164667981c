"""Step times on any GPU, from its data sheet, the model's dimensions and assumed efficiencies.

A step has three parts, one after the other:

* weights: the matrix products, limited by their arithmetic (tokens x weights) and by reading the weights. The
  roofline's ridge is round in measurements, so the two are combined as the root of their squares, not by a maximum: at
  128 tokens on an A100 the maximum is 27 % below Vidur's profile of Llama-3-8B, the root 2 %.
* the output head, likewise, over the rows that sample.
* attention: arithmetic of the chunks' token pairs, and reading the keys and values of all context.

A fixed time is added and, on several GPUs, two all-reduces a layer. Ranks of our own (`RooflineCost.in_ranks`) gather
each other's sums instead, in float32, and add them in order: twice a layer each gets those of all others. A stage of
a pipeline has some of the layers, the last one the output head too; each has the fixed time, and hands its activations
on. A KV group has all weights of its stage. Of rows that several groups compute, once a layer each gets the others'
outputs, with the maximum and the sum of each head's scores, in float32. All arithmetic is in integers, so durations are
the same on every machine.
"""

from __future__ import annotations

from functools import cached_property
from math import isqrt
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, structs

from eventlm.core.predictor import NotNegative, StepShape
from eventlm.core.shards import deal_out
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.cost.group_work import GroupWork
from eventlm.replay.cost.model import MILLION, Overheads, Positive
from eventlm.types import ceil_div

#: A part of a peak, in ppm.
Share = Annotated[int, Meta(ge=1, le=1_000_000)]
_PS_PER_SECOND = 10**12
#: Ranks exchange partial sums in float32.
_BYTES_PER_SUM = 4


class Accelerator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU's peaks by its data sheet, and how many of them hold the model (tensor parallel).

    flops_per_s: dense, in the type of the weights. memory_bytes: of one GPU; 0: unknown. all_reduce: between these
    GPUs, the latency of a small one and the bandwidth. link: from one rank to another, likewise.
    """

    name: str
    flops_per_s: Positive
    memory_bytes_per_s: Positive
    memory_bytes: NotNegative = 0
    num_gpus: Positive = 1
    all_reduce_ns: NotNegative = 0
    all_reduce_bytes_per_s: NotNegative = 0
    link_ns: NotNegative = 0
    link_bytes_per_s: NotNegative = 0

    def __post_init__(self) -> None:
        if self.num_gpus > 1 and not self.all_reduce_bytes_per_s:
            raise ValueError("all_reduce_bytes_per_s is missing; it is needed for several GPUs")


class Dimensions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder with gated feed-forward layers; names as in its config.json."""

    name: str
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    vocab_size: Positive
    bytes_per_weight: Positive = 2
    bytes_per_cache_value: Positive = 2

    @property
    def layer_weights(self) -> int:
        """Weights of the matrix products of all layers."""
        attention = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        return self.num_hidden_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


class Efficiency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Achieved parts of the peaks in ppm, and the constant time of a step."""

    compute_ppm: Share
    memory_ppm: Share
    attention_compute_ppm: Share
    attention_memory_ppm: Share
    fixed_ns: NotNegative


class RooflineCost(Struct, frozen=True, kw_only=True, tag="roofline", forbid_unknown_fields=True, dict=True):
    """A cost model from a machine, a model's dimensions and efficiencies.

    tensor: ranks that share each layer, each on a machine of its own; stages: stages that share the layers; groups: KV
    groups, each of which has all of these ranks.
    """

    machine: Accelerator
    model: Dimensions
    efficiency: Efficiency
    overheads: Overheads = Overheads()
    tensor: Positive = 1
    stages: Positive = 1
    groups: Positive = 1

    def in_ranks(self, tensor: int, stages: int, groups: int = 1) -> RooflineCost:
        """The same model split over ranks. Raises UsageError if it cannot be, or if the links are not known."""
        machine, model = self.machine, self.model
        if tensor * stages * groups > 1 and not machine.link_bytes_per_s:
            raise UsageError("the cost model does not say how fast ranks are linked: give its machine link_bytes_per_s")
        if tensor > 1 and machine.num_gpus > 1:
            raise UsageError(
                f"--tensor-parallel-size {tensor}: the cost model already splits each layer, over "
                f"{machine.num_gpus} x {machine.name}; take one of a single GPU"
            )
        if tensor > model.num_attention_heads:
            raise UsageError(
                f"--tensor-parallel-size {tensor}: {model.name} has {model.num_attention_heads} attention heads"
            )
        if stages > model.num_hidden_layers:
            raise UsageError(
                f"--pipeline-parallel-size {stages}: {model.name} has {counted(model.num_hidden_layers, 'layer')}"
            )
        return structs.replace(self, tensor=tensor, stages=stages, groups=groups)

    def in_parts(self, num_stages: int, num_groups: int) -> RooflineCost:
        """With as many tensor ranks. Raises UsageError as `in_ranks` does."""
        return self.in_ranks(self.tensor, num_stages, num_groups)

    @property
    def num_gpus(self) -> int:
        """Of one replica."""
        return self.machine.num_gpus * self.tensor * self.stages * self.groups

    @cached_property
    def rates(self) -> list[Rates]:
        """Of each stage, derived from the fields."""
        layers = deal_out(self.model.num_hidden_layers, self.stages)
        return [_rates(self, len(each), is_last=each is layers[-1]) for each in layers]

    @cached_property
    def hand_over_ps(self) -> int:
        """Of a token's activations, from one stage to the next."""
        num_bytes = self.model.hidden_size * self.model.bytes_per_weight
        return num_bytes * _PS_PER_SECOND // max(self.machine.link_bytes_per_s, 1)

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """Of the slowest stage."""
        return max(self.stages_ns(GroupWork(shape), replica, step, start_ns))

    def stages_ns(self, work: GroupWork, replica: int, step: int, start_ns: int = 0) -> list[int]:
        """Of each stage the parts of the step, one after the other."""
        return [_stage_ns(rates, work) for rates in self.rates]

    def hand_over_ns(self, shape: StepShape) -> int:
        """The activations of the step's tokens go over a link."""
        num_tokens = shape.prefill_tokens + shape.num_decodes
        return self.overheads.hand_over_ns + self.machine.link_ns + self.hand_over_ps * num_tokens // 1000


def _stage_ns(rates: Rates, work: GroupWork) -> int:
    """A chunk counts as a row that samples."""
    shape = work.shape
    num_tokens = shape.prefill_tokens + shape.num_decodes
    compute_ps = rates.token_ps * num_tokens
    head_ps = rates.head_row_ps * (shape.num_decodes + shape.num_chunks)
    picoseconds = (
        rates.fixed_ps
        + isqrt(compute_ps * compute_ps + rates.weights_ps_squared)
        + isqrt(head_ps * head_ps + rates.head_ps_squared)
        + rates.context_ps * shape.context_tokens
        + rates.pair_ps * shape.chunk_context
        + rates.exchange_token_ps * num_tokens
    )
    if work.parts:
        picoseconds += rates.merge_ps + rates.merge_part_ps * work.parts
    return max(picoseconds // 1000, 1)


class Rates(NamedTuple):
    """Picoseconds of a stage's part of a step; of a token in it; of reading the weights; the same of the output head,
    0 but in the last stage; of reading a context token's keys and values; of a token pair in attention; of a token's
    sums, which go to and fro between GPUs or ranks; of the messages between KV groups, and of a row's part in them.
    """

    fixed_ps: int
    token_ps: int
    weights_ps_squared: int
    head_row_ps: int
    head_ps_squared: int
    context_ps: int
    pair_ps: int
    exchange_token_ps: int
    merge_ps: int
    merge_part_ps: int


def _rates(cost: RooflineCost, num_layers: int, *, is_last: bool) -> Rates:
    """Of a stage with so many layers."""
    machine, efficiency, tensor = cost.machine, cost.efficiency, cost.tensor
    model = structs.replace(cost.model, num_hidden_layers=num_layers)
    flops_per_s, bytes_per_s = machine.flops_per_s * machine.num_gpus, machine.memory_bytes_per_s * machine.num_gpus

    def compute_ps(num_weights: int, share_ppm: int) -> int:
        """A multiplication and an addition a weight."""
        return 2 * num_weights * _PS_PER_SECOND * MILLION // (flops_per_s * share_ppm)

    def read_ps(num_bytes: int, share_ppm: int) -> int:
        return num_bytes * _PS_PER_SECOND * MILLION // (bytes_per_s * share_ppm)

    # Of the slowest rank. Heads are dealt out whole, and those of keys and values repeated where there are too few.
    layer_weights = ceil_div(model.layer_weights, tensor)
    head_weights = ceil_div(model.vocab_size * model.hidden_size, tensor) if is_last else 0
    num_kv_heads = ceil_div(model.num_key_value_heads, tensor)
    group_size = model.num_attention_heads // model.num_key_value_heads
    is_whole = tensor <= model.num_key_value_heads
    num_heads = num_kv_heads * group_size if is_whole else ceil_div(model.num_attention_heads, tensor)
    cache_values = 2 * num_layers * num_kv_heads * model.head_dim
    # Scores and the weighted sum of values: twice the query's width for each token in its context.
    pair_weights = 2 * num_layers * num_heads * model.head_dim
    exchanges = _exchanges(cost, num_layers)
    merged_bytes = num_layers * num_heads * (model.head_dim + 2) * _BYTES_PER_SUM
    return Rates(
        fixed_ps=1000 * (efficiency.fixed_ns + exchanges.fixed_ns),
        token_ps=compute_ps(layer_weights, efficiency.compute_ppm),
        weights_ps_squared=read_ps(layer_weights * model.bytes_per_weight, efficiency.memory_ppm) ** 2,
        head_row_ps=compute_ps(head_weights, efficiency.compute_ppm),
        head_ps_squared=read_ps(head_weights * model.bytes_per_weight, efficiency.memory_ppm) ** 2,
        context_ps=read_ps(cache_values * model.bytes_per_cache_value, efficiency.attention_memory_ppm),
        pair_ps=compute_ps(pair_weights, efficiency.attention_compute_ppm),
        exchange_token_ps=exchanges.token_ps,
        merge_ps=1000 * num_layers * machine.link_ns,
        merge_part_ps=merged_bytes * _PS_PER_SECOND // max(machine.link_bytes_per_s, 1),
    )


class _Exchanges(NamedTuple):
    """What adding up the sums of several GPUs or ranks takes: nanoseconds a step, picoseconds a token."""

    fixed_ns: int
    token_ps: int


def _exchanges(cost: RooflineCost, num_layers: int) -> _Exchanges:
    """Two of them a layer."""
    machine, count = cost.machine, 2 * num_layers
    if machine.num_gpus > 1:
        num_bytes = count * cost.model.hidden_size * cost.model.bytes_per_weight
        return _Exchanges(
            count * machine.all_reduce_ns, num_bytes * _PS_PER_SECOND // max(machine.all_reduce_bytes_per_s, 1)
        )
    if cost.tensor > 1:
        gathered_bytes = count * (cost.tensor - 1) * cost.model.hidden_size * _BYTES_PER_SUM
        return _Exchanges(count * machine.link_ns, gathered_bytes * _PS_PER_SECOND // max(machine.link_bytes_per_s, 1))
    return _Exchanges(0, 0)
