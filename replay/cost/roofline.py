"""Step times on any GPU, from its data sheet, the model's dimensions and assumed efficiencies.

A step has three parts, one after the other:

* weights: the matrix products, limited by their arithmetic (tokens x weights) and by reading the weights. The
  roofline's ridge is round in measurements, so the two are combined as the root of their squares, not by a maximum: at
  128 tokens on an A100 the maximum is 27 % below Vidur's profile of Llama-3-8B, the root 2 %.
* the output head, likewise, over the rows that sample.
* attention: arithmetic of the chunks' token pairs, and reading the keys and values of all context.

A fixed time is added and, on several GPUs, two all-reduces a layer. All arithmetic is in integers, so durations are the
same on every machine.
"""

from __future__ import annotations

from functools import cached_property
from math import isqrt
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from eventlm.core.predictor import NotNegative, StepShape
from eventlm.replay.cost.model import MILLION, Overheads, Positive

#: A part of a peak, in ppm.
Share = Annotated[int, Meta(ge=1, le=1_000_000)]
_PS_PER_SECOND = 10**12


class Accelerator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU's peaks by its data sheet, and how many of them hold the model (tensor parallel).

    flops_per_s: dense, in the type of the weights. memory_bytes: of one GPU; 0: unknown. all_reduce: between these
    GPUs, the latency of a small one and the bandwidth.
    """

    name: str
    flops_per_s: Positive
    memory_bytes_per_s: Positive
    memory_bytes: NotNegative = 0
    num_gpus: Positive = 1
    all_reduce_ns: NotNegative = 0
    all_reduce_bytes_per_s: NotNegative = 0

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
    """A cost model from a machine, a model's dimensions and efficiencies."""

    machine: Accelerator
    model: Dimensions
    efficiency: Efficiency
    overheads: Overheads = Overheads()

    @cached_property
    def rates(self) -> Rates:
        """Derived from the fields, in picoseconds a unit."""
        return _rates(self.machine, self.model, self.efficiency)

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """The parts of the step, one after the other. A chunk counts as a row that samples."""
        rates = self.rates
        num_tokens = shape.prefill_tokens + shape.num_decodes
        compute_ps = rates.token_ps * num_tokens
        head_ps = rates.head_row_ps * (shape.num_decodes + shape.num_chunks)
        picoseconds = (
            rates.fixed_ps
            + isqrt(compute_ps * compute_ps + rates.weights_ps_squared)
            + isqrt(head_ps * head_ps + rates.head_ps_squared)
            + rates.context_ps * shape.context_tokens
            + rates.pair_ps * shape.chunk_context
            + rates.all_reduce_token_ps * num_tokens
        )
        return max(picoseconds // 1000, 1)


class Rates(NamedTuple):
    """Picoseconds of a step; of a token in it; of reading the weights; the same of the output head; of reading a
    context token's keys and values; of a token pair in attention; of a token in the all-reduces.
    """

    fixed_ps: int
    token_ps: int
    weights_ps_squared: int
    head_row_ps: int
    head_ps_squared: int
    context_ps: int
    pair_ps: int
    all_reduce_token_ps: int


def _rates(machine: Accelerator, model: Dimensions, efficiency: Efficiency) -> Rates:
    flops_per_s, bytes_per_s = machine.flops_per_s * machine.num_gpus, machine.memory_bytes_per_s * machine.num_gpus

    def compute_ps(num_weights: int, share_ppm: int) -> int:
        """A multiplication and an addition a weight."""
        return 2 * num_weights * _PS_PER_SECOND * MILLION // (flops_per_s * share_ppm)

    def read_ps(num_bytes: int, share_ppm: int) -> int:
        return num_bytes * _PS_PER_SECOND * MILLION // (bytes_per_s * share_ppm)

    head_weights = model.vocab_size * model.hidden_size
    cache_values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    # Scores and the weighted sum of values: twice the query's width for each token in its context.
    pair_weights = 2 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
    num_reduces = 2 * model.num_hidden_layers if machine.num_gpus > 1 else 0
    reduced_bytes = num_reduces * model.hidden_size * model.bytes_per_weight
    return Rates(
        fixed_ps=1000 * (efficiency.fixed_ns + num_reduces * machine.all_reduce_ns),
        token_ps=compute_ps(model.layer_weights, efficiency.compute_ppm),
        weights_ps_squared=read_ps(model.layer_weights * model.bytes_per_weight, efficiency.memory_ppm) ** 2,
        head_row_ps=compute_ps(head_weights, efficiency.compute_ppm),
        head_ps_squared=read_ps(head_weights * model.bytes_per_weight, efficiency.memory_ppm) ** 2,
        context_ps=read_ps(cache_values * model.bytes_per_cache_value, efficiency.attention_memory_ppm),
        pair_ps=compute_ps(pair_weights, efficiency.attention_compute_ppm),
        all_reduce_token_ps=reduced_bytes * _PS_PER_SECOND // max(machine.all_reduce_bytes_per_s, 1),
    )
