"""The least that each part of a step must do, and the least time that it can take on a machine.

A part reads bytes (weights once a step, the keys and values of all contexts) and multiplies; its floor is the longer of
the two, had it all of the machine's bandwidth or of its multipliers. Of a layer's experts a step reads at least those
of one token, and more if tokens choose others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from eventlm.bench.step.machine_probe import Machine
from eventlm.events import Launched
from eventlm.models.program import FLOAT32_WEIGHTS, WeightKey
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.decoder_weights import EMBEDDING, HEAD, model_weights

#: How many products of int8 an instruction does in the time of one of bfloat16, with vectors (VNNI) as with tiles
#: (AMX). Not measured: torch's own int8 products fall further behind what the processor can do than its float ones.
INT8_SPEED = 2
#: The part that multiplies by a matrix of a layer.
_PARTS = {
    **dict.fromkeys(("query", "key", "value", "output_gate", "mixed", "delta_gate"), "qkv_proj"),
    "output": "o_proj",
    **dict.fromkeys(("gate", "up"), "gate_up_proj"),
    "down": "down_proj",
    "router": "router",
    **dict.fromkeys(("inputs_projection", "input_gate", "input_up"), "layer_inputs"),
}
_EXPERTS = "experts"
#: Codes that are widened to floats as they are multiplied.
_CODES_OF_FLOATS = ("F8_128",)


class StepWork(NamedTuple):
    """The least work of a part of a step: bytes, and operations on floats and on int8, two for each product."""

    num_bytes: int
    num_flops: int
    num_int8_ops: int = 0


class BatchShape(NamedTuple):
    """Rows of a step that sample, and each row's first position and number of tokens."""

    num_sampled: int
    rows: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return sum(num_tokens for _, num_tokens in self.rows)

    def kv_tokens(self, window: int = 0) -> int:
        """Tokens whose keys and values are read, where a query sees `window` of them (0: all before it)."""
        return sum(start + n if not window else min(start + n, window + n - 1) for start, n in self.rows)

    def num_pairs(self, window: int = 0) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(_num_pairs(start, n, window or start + n) for start, n in self.rows)


def _num_pairs(start: int, num_tokens: int, window: int) -> int:
    """Of a row: its first tokens see all before them, the others `window`."""
    num_first = min(max(window - start, 0), num_tokens)
    return num_first * start + num_first * (num_first + 1) // 2 + (num_tokens - num_first) * window


def shape_of(launch: Launched) -> BatchShape:
    """Of a step. A sequence is as long as its confirmed tokens and the ones that its steps in flight give."""
    decodes = [(confirmed + in_flight - 1, 1) for _, _, confirmed, in_flight in launch.decodes]
    chunks = [(start, num_tokens) for _, _, start, num_tokens, _ in launch.chunks]
    return BatchShape(len(decodes) + sum(samples for *_, samples in launch.chunks), decodes + chunks)


class ModelFigures(Struct, frozen=True, kw_only=True):
    """What the floors follow from: the model's shape, and what the worker holds. weight_bytes: of each matrix, all
    layers together. integers: see `integer_matrices`.
    """

    config: ModelSpec
    weight_bytes: Mapping[str, int]
    kv_token_bytes: int
    integers: frozenset[WeightKey] = frozenset()


def num_matrix_weights(
    model: ModelSpec, *, is_active: bool = False, among: Container[WeightKey] | None = None
) -> dict[str, int]:
    """Weights of the matrices by the part that multiplies by them, over all layers.

    is_active: of the experts only as many as a token passes. among: only of these matrices.
    """
    counts: Counter[str] = Counter()
    output = EMBEDDING if model.tie_word_embeddings else HEAD
    for key, shape in model_weights(model).items():
        part = "lm_head" if key == output else _EXPERTS if key.expert >= 0 else _PARTS.get(key.name, "")
        if key.kind != "weight" or not part or (among is not None and key not in among):
            continue
        experts = model.layers[key.layer].experts
        if is_active and experts is not None and key.expert >= experts.num_active:
            continue
        counts[part] += math.prod(shape)
    return dict(counts)


def integer_matrices(model: ModelSpec, quantization: str, types: Mapping[WeightKey, str]) -> frozenset[WeightKey]:
    """The matrices whose products are of integers. types: of those that are codes, see `matrix_types`."""
    if quantization == "int8":
        return frozenset(key for key in model_weights(model) if key.name not in FLOAT32_WEIGHTS)
    return frozenset(key for key, kind in types.items() if kind not in _CODES_OF_FLOATS)


def step_work(model: ModelFigures, shape: BatchShape) -> dict[str, StepWork]:
    """The work of each part."""
    config = model.config
    work, stored = {}, num_matrix_weights(config)
    integers = num_matrix_weights(config, is_active=True, among=model.integers)
    for part, number in num_matrix_weights(config, is_active=True).items():
        num_products = 2 * (shape.num_sampled if part == "lm_head" else shape.num_tokens)
        num_bytes, num_integers = model.weight_bytes[part] * number // stored[part], integers.get(part, 0)
        work[part] = StepWork(num_bytes, num_products * (number - num_integers), num_products * num_integers)
    num_stored = sum(math.prod(layer.kv_shape) for layer in config.layers if layer.kv_shape is not None)
    work["attention"] = total(
        StepWork(
            num_layers * shape.kv_tokens(window) * model.kv_token_bytes * math.prod(kv_shape) // num_stored,
            # A score and a weighted value for each pair.
            4 * num_layers * num_heads * kv_shape.head_dim * shape.num_pairs(window),
        )
        for (window, num_heads, kv_shape), num_layers in Counter(
            (each.window, each.num_heads, each.kv_shape)
            for each in (layer.attention for layer in config.layers)
            if each is not None
        ).items()
    )
    work["rotary"] = StepWork(shape.num_tokens * model.kv_token_bytes, 0)
    return work


def total(works: Iterable[StepWork]) -> StepWork:
    """The sum of all."""
    return StepWork(*map(sum, zip(*works, strict=True)))


def floor_ns(work: StepWork, machine: Machine) -> float:
    """The least time that the work takes."""
    num_flops = work.num_flops + work.num_int8_ops / INT8_SPEED
    return 1e9 * max(work.num_bytes / machine.bytes_per_second, num_flops / machine.flops_per_second)
