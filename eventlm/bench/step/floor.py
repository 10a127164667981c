"""The least that each part of a step must do, and the least time that it can take on a machine.

A part reads bytes (weights once a step, the keys and values of all contexts) and multiplies; its floor is the longer of
the two, had it all of the machine's bandwidth or of its multipliers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from eventlm.bench.step.machine_probe import Machine
from eventlm.events import Launched
from eventlm.models.config import DecoderConfig

#: How many products of int8 an instruction does in the time of one of bfloat16, with vectors (VNNI) as with tiles
#: (AMX). Not measured: torch's own int8 products fall further behind what the processor can do than its float ones.
INT8_SPEED = 2


class StepWork(NamedTuple):
    """The least work of a part of a step: bytes, and operations on floats and on int8, two for each product."""

    num_bytes: int
    num_flops: int
    num_int8_ops: int = 0


class BatchShape(NamedTuple):
    """Tokens of a step, rows of it that sample, tokens whose keys and values are read, and pairs of a query and a
    key.
    """

    num_tokens: int
    num_sampled: int
    kv_tokens: int
    num_pairs: int


def shape_of(launch: Launched) -> BatchShape:
    """Of a step. A sequence is as long as its confirmed tokens and the ones that its steps in flight give."""
    lengths = [confirmed + in_flight for _, _, confirmed, in_flight in launch.decodes]
    chunks = [(start, num_tokens) for _, _, start, num_tokens, _ in launch.chunks]
    return BatchShape(
        num_tokens=len(lengths) + sum(num_tokens for _, num_tokens in chunks),
        num_sampled=len(lengths) + sum(samples for *_, samples in launch.chunks),
        kv_tokens=sum(lengths) + sum(start + num_tokens for start, num_tokens in chunks),
        num_pairs=sum(lengths) + sum(n * start + n * (n + 1) // 2 for start, n in chunks),
    )


class ModelFigures(Struct, frozen=True, kw_only=True):
    """What the floors follow from: the model's shape, and what the worker holds. weight_bytes: of each matrix, all
    layers together. is_int8: what the matrices hold.
    """

    config: DecoderConfig
    weight_bytes: Mapping[str, int]
    kv_token_bytes: int
    is_int8: bool


def step_work(model: ModelFigures, shape: BatchShape) -> dict[str, StepWork]:
    """The work of each part."""
    config = model.config
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    num_weights = {
        "qkv_proj": layers * hidden * (heads + 2 * config.num_kv_heads * config.head_dim),
        "o_proj": layers * heads * hidden,
        "gate_up_proj": 2 * layers * hidden * inner,
        "down_proj": layers * inner * hidden,
        "lm_head": hidden * config.vocab_size,
    }
    work = {}
    for part, number in num_weights.items():
        num_ops = 2 * number * (shape.num_sampled if part == "lm_head" else shape.num_tokens)
        num_bytes = model.weight_bytes[part]
        work[part] = StepWork(num_bytes, 0, num_ops) if model.is_int8 else StepWork(num_bytes, num_ops)
    # A score and a weighted value for each pair.
    work["attention"] = StepWork(shape.kv_tokens * model.kv_token_bytes, 4 * layers * heads * shape.num_pairs)
    work["rotary"] = StepWork(shape.num_tokens * model.kv_token_bytes, 0)
    return work


def total(works: Iterable[StepWork]) -> StepWork:
    """The sum of all."""
    return StepWork(*map(sum, zip(*works, strict=True)))


def floor_ns(work: StepWork, machine: Machine) -> float:
    """The least time that the work takes."""
    num_flops = work.num_flops + work.num_int8_ops / INT8_SPEED
    return 1e9 * max(work.num_bytes / machine.bytes_per_second, num_flops / machine.flops_per_second)
