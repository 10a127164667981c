"""The operations of a forward pass, in order, as made of a `ModelSpec`. Every forward pass executes this list.

An operation reads and writes sets of rows, a row for each token of the step:

    residual   the residual stream
    normed     inputs of the products that begin a part of a layer
    attended   what the heads of a layer give, or its convolution
    inner      what the neurons of a layer give
    update     what a part adds to the residual stream, before its own norm
    kept       what the shared part of a layer with experts gives, after its norm
    inputs     what each layer adds by the token's id
    chosen     the numbers of the experts of a layer that a token passes, ascending, and the share of each

Weights have a name of `WEIGHTS`, the number of their layer, and perhaps that of an expert. Matrices of `MATRICES` are
those of one product: `qkv` consists of query, key and value, and of gates behind attention if there are any, `mixed` of
what is convolved and of the gates of the delta rule, `gate_up` of gate and up. In a layer with experts, the gate, up
and down of no expert are those of the shared part.

Layers with a state of each sequence have a part of `ModelSpec.state_size` numbers, from that of `state` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

from eventlm.models.spec import (
    Activation,
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

Matrix = Literal["qkv", "mixed", "output", "gate_up", "up", "down", "inputs_projection", "input_gate", "input_up"]
NormWeight = Literal[
    "attention_norm",
    "attention_out_norm",
    "feed_forward_norm",
    "feed_forward_out_norm",
    "input_out_norm",
    "router_norm",
    "experts_norm",
    "shared_out_norm",
    "experts_out_norm",
    "final_norm",
]
MATRICES: tuple[Matrix, ...] = get_args(Matrix)
#: Of the whole model, then of a layer. Each but an embedding, a norm of queries and keys, sinks, correction,
#: shared_scale, and what only layers with inputs and the delta rule have, may have a bias.
WEIGHTS = (
    *("embedding", "lm_head", "final_norm"),
    *("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm", "input_out_norm"),
    *("router_norm", "experts_norm", "shared_out_norm", "experts_out_norm"),
    *("query", "key", "value", "output", "gate", "up", "down", "query_norm", "key_norm", "sinks"),
    *("inputs_embedding", "inputs_projection", "inputs_norm", "input_gate", "input_up", "layer_scale"),
    *("router", "correction", "expert_scale", "shared_scale", "output_gate"),
    *("mixed", "taps", "delta_gate", "delta_beta", "delta_decay", "decay_rate", "decay_shift", "delta_scale"),
)
#: Are float32 whatever the dtype of the others, and so are their products: a rounding could choose another expert, or
#: add up in a state.
FLOAT32_WEIGHTS = (
    *("router", "correction", "expert_scale", "shared_scale"),
    *("taps", "delta_beta", "delta_decay", "decay_rate", "decay_shift", "delta_scale"),
)
#: Embeddings, of which rows are looked up by token ids. The first may be the output matrix as well.
LOOKED_UP = ("embedding", "inputs_embedding")


class WeightKey(NamedTuple):
    """A weight of the model: one of `WEIGHTS`, its layer (0 for those of the whole model), and which of its two.

    expert: its number; -1 for what is not one expert's.
    """

    name: str
    layer: int
    kind: Literal["weight", "bias"]
    expert: int = -1


class Embed(Struct, frozen=True, tag=True):
    """residual = multiplier * the embedding of each token."""

    multiplier: float


class Inputs(Struct, frozen=True, tag=True):
    """inputs = (norm(multiplier * inputs_projection x normed) + sqrt(size) * inputs_embedding) / sqrt(2).

    Of each token `size` numbers for each layer, which have their norm apart. `inputs_embedding` is that of the token.
    """

    size: int
    multiplier: float


class Norm(Struct, frozen=True, tag=True):
    """normed = multiplier * norm(residual)."""

    weight: NormWeight
    layer: int
    multiplier: float = 1.0


class Take(Struct, frozen=True, tag=True):
    """normed = residual: the stream as it is, in layers that have no norm before their parts, only after them."""


class Heads(Struct, frozen=True, tag=True):
    """Query, key and value of `normed`, each with its bias, then the norm and the rotation of queries and keys.

    Keys and values go to the cache, queries wait for `Attend`. In a layer that attends to the keys of another there are
    only queries. rope: number of the table in `ModelSpec.ropes`; -1: none.
    """

    layer: int
    attention: AttentionSpec
    rope: int


class Attend(Struct, frozen=True, tag=True):
    """attended = the attention of the layer's queries, times their gates if they have any."""

    layer: int
    attention: AttentionSpec


class Convolve(Struct, frozen=True, tag=True):
    """attended = C * (taps x the last inputs B * x), with B, C, x = mixed x normed. In float32."""

    layer: int
    convolution: ConvolutionSpec
    state: int


class Delta(Struct, frozen=True, tag=True):
    """attended = delta_scale * norm(the delta rule) * silu(delta_gate x normed), each head by itself, in float32.

    Queries, keys and values are silu(taps x the last inputs mixed x normed), beta is sigmoid(delta_beta x normed),
    decay exp(-exp(decay_rate) * softplus(delta_decay x normed + decay_shift)).
    """

    layer: int
    delta: DeltaSpec
    state: int


class Activate(Struct, frozen=True, tag=True):
    """inner = activation(gate) * up, or activation(up) with the matrix `up` alone, of `normed`."""

    layer: int
    matrix: Literal["gate_up", "up"]
    activation: Activation


class ActivateInput(Struct, frozen=True, tag=True):
    """inner = activation(input_gate x normed) * the layer's part of `inputs`."""

    layer: int
    size: int
    activation: Activation


class MultiplyAdd(Struct, frozen=True, tag=True):
    """residual += multiplier * (matrix x source + bias)."""

    matrix: Literal["output", "down"]
    layer: int
    source: Literal["attended", "inner"]
    multiplier: float


class Multiply(Struct, frozen=True, tag=True):
    """update = matrix x source + bias."""

    matrix: Literal["output", "down", "input_up"]
    layer: int
    source: Literal["attended", "inner"]


class AddNormed(Struct, frozen=True, tag=True):
    """residual += multiplier * norm(update)."""

    weight: NormWeight
    layer: int
    multiplier: float


class Keep(Struct, frozen=True, tag=True):
    """kept = norm(update)."""

    weight: NormWeight
    layer: int


class AddKept(Struct, frozen=True, tag=True):
    """update = kept + norm(update)."""

    weight: NormWeight
    layer: int


class Scale(Struct, frozen=True, tag=True):
    """residual *= layer_scale."""

    layer: int


class Route(Struct, frozen=True, tag=True):
    """chosen = the experts of each token, of `normed`. The router and what follows are computed in float32."""

    layer: int
    experts: ExpertsSpec


class ScaleInner(Struct, frozen=True, tag=True):
    """inner *= sigmoid(shared_scale x normed), of a shared part, whose last product has no bias."""

    layer: int


class Experts(Struct, frozen=True, tag=True):
    """update = the sum of share * (down x activation(gate_up x normed)) over the chosen experts.

    It is taken in float32 in the order of their numbers, so that a token's does not depend on others of the step, and
    added to the `update` that the shared part has left, if there is one that is not kept.
    """

    layer: int
    experts: ExpertsSpec


class Add(Struct, frozen=True, tag=True):
    """residual += multiplier * update."""

    multiplier: float


Mixing = Heads | Attend | Convolve | Delta
ExpertOperation = Route | ScaleInner | Experts | Add | Keep | AddKept
InputOperation = Inputs | ActivateInput | Scale
Operation = (
    Embed | Norm | Take | Mixing | Activate | MultiplyAdd | Multiply | AddNormed | ExpertOperation | InputOperation
)


def program_of(model: ModelSpec) -> tuple[Operation, ...]:
    """What to do from token ids to the residual stream after the last layer.

    A model without an embedding begins with the residual stream. The last norm, the output matrix, and what `ModelSpec`
    says of logits follow when logits are wanted.
    """
    operations: list[Operation] = [Embed(model.embedding_multiplier)] if model.has_embedding else []
    if model.layer_inputs is not None:
        operations += [Take(), Inputs(model.layer_inputs.size, model.hidden_size**-0.5)]
    ropes: dict[RopeSpec | None, int] = {None: -1} | {rope: number for number, rope in enumerate(model.ropes)}
    state = 0
    for number, layer in enumerate(model.layers):
        operations += _layer(layer, number, _mixer(layer, number, ropes, state))
        operations += _end(layer, number, model.layer_inputs)
        state += layer.recurrent.state_size if layer.recurrent is not None else 0
    return tuple(operations)


def _mixer(layer: LayerSpec, number: int, ropes: Mapping[RopeSpec | None, int], state: int) -> list[Operation]:
    if layer.attention is not None:
        return [Heads(number, layer.attention, ropes[layer.attention.rope]), Attend(number, layer.attention)]
    if isinstance(layer.recurrent, ConvolutionSpec):
        return [Convolve(number, layer.recurrent, state)]
    return [Delta(number, layer.recurrent, state)] if layer.recurrent is not None else []


def _layer(layer: LayerSpec, number: int, mixer: Sequence[Operation]) -> list[Operation]:
    begin, *rest = _feed_forward(layer, number)
    first = Take() if layer.norms == "after" else Norm("attention_norm", number)
    if layer.norms == "parallel":
        return [first, mixer[0], begin, *mixer[1:], *_add(layer, number, "output"), *rest]
    second = Take() if layer.norms == "after" else Norm("feed_forward_norm", number)
    return [first, *mixer, *_add(layer, number, "output"), second, begin, *rest]


def _end(layer: LayerSpec, number: int, inputs: LayerInputsSpec | None) -> list[Operation]:
    operations: list[Operation] = []
    if inputs is not None:
        operations += [
            Take(),
            ActivateInput(number, inputs.size, inputs.activation),
            Multiply("input_up", number, "inner"),
            AddNormed("input_out_norm", number, 1.0),
        ]
    return [*operations, Scale(number)] if layer.has_scale else operations


def _feed_forward(layer: LayerSpec, number: int) -> list[Operation]:
    part = layer.feed_forward
    if isinstance(part, FeedForwardSpec):
        return [activation_of(part, number), *_add(layer, number, "down")]
    if part.has_norms and part.shared is not None:
        return [
            activation_of(part.shared, number),
            Multiply("down", number, "inner"),
            Keep("shared_out_norm", number),
            Norm("router_norm", number, part.router_multiplier),
            Route(number, part),
            Norm("experts_norm", number),
            Experts(number, part),
            AddKept("experts_out_norm", number),
            AddNormed("feed_forward_out_norm", number, layer.residual_multiplier),
        ]
    operations: list[Operation] = [Route(number, part)]
    if part.shared is not None:
        scale = [ScaleInner(number)] if part.has_shared_gate else []
        operations += [activation_of(part.shared, number), *scale, Multiply("down", number, "inner")]
    operations.append(Experts(number, part))
    if layer.norms in ("before", "parallel"):
        return [*operations, Add(layer.residual_multiplier)]
    return [*operations, AddNormed("feed_forward_out_norm", number, layer.residual_multiplier)]


def activation_of(part: FeedForwardSpec, layer: int) -> Activate:
    """The first operation of a part, or of an expert."""
    return Activate(layer, "gate_up" if part.is_gated else "up", part.activation)


def _add(layer: LayerSpec, number: int, matrix: Literal["output", "down"]) -> list[Operation]:
    """The last product of a part, added to the residual stream, by way of its norm if it has one."""
    source: Literal["attended", "inner"] = "attended" if matrix == "output" else "inner"
    if layer.norms in ("before", "parallel"):
        return [MultiplyAdd(matrix, number, source, layer.residual_multiplier)]
    weight: NormWeight = "attention_out_norm" if matrix == "output" else "feed_forward_out_norm"
    return [Multiply(matrix, number, source), AddNormed(weight, number, layer.residual_multiplier)]
