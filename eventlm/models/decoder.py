"""A decoder in torch's operations, any dtype: executes the list of `program.py`.

Query, key and value are one matrix, so are gate and up. The model has no notion of caches, batches or ranks: it runs
over the tokens of a step in one flat dimension and passes each layer's query, key and value to the attention that it
was called with. To time the operations, pass a stopwatch's `lap`.

Shapes: T tokens, S of them whose logits are wanted, H query heads, K key-value heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from eventlm.kernels.int8_linear import BLOCK, dequantize_rows, int8_linear
from eventlm.kernels.pointwise import activate, activate_gated, cap_softly, layer_norm, rms_norm, rotary_embedding
from eventlm.kernels.sequence_states import NO_STATES, StepStates
from eventlm.models.experts import Chosen, route
from eventlm.models.program import (
    FLOAT32_WEIGHTS,
    LOOKED_UP,
    Activate,
    ActivateInput,
    Add,
    AddKept,
    AddNormed,
    Attend,
    Convolve,
    Delta,
    Embed,
    Experts,
    Heads,
    Inputs,
    Keep,
    Multiply,
    MultiplyAdd,
    Norm,
    Route,
    Scale,
    ScaleInner,
    Take,
    WeightKey,
    activation_of,
    program_of,
)
from eventlm.models.recurrent import DeltaWeights, convolve_gated, decays_of, gated_delta
from eventlm.models.rope import RopeTable, Rotation
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.decoder_weights import model_weights

#: Called with the name of each operation at its end.
Lap = Callable[[str], None]

#: The matrix that a weight is a part of, if not one of its own. `up` is one of its own in a part without a gate.
_FUSED_IN = {
    **dict.fromkeys(("query", "key", "value", "output_gate"), "qkv"),
    **dict.fromkeys(("mixed", "delta_gate"), "mixed"),
    **dict.fromkeys(("gate", "up"), "gate_up"),
}
#: The operation that multiplies by a matrix, by its name.
LAPS = {
    "qkv": "qkv_proj",
    "mixed": "qkv_proj",
    "output": "o_proj",
    "gate_up": "gate_up_proj",
    "up": "gate_up_proj",
    "down": "down_proj",
    "lm_head": "lm_head",
    "router": "router",
    **dict.fromkeys(("inputs_projection", "input_gate", "input_up"), "layer_inputs"),
}
_EMBEDDING, _HEAD = WeightKey("embedding", 0, "weight"), WeightKey("lm_head", 0, "weight")


class Attention(Protocol):
    """Stores the step's keys and values of a layer, then attends as the layer's `AttentionSpec` says."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
        """The attention of each query over its sequence, [T, H, D]. Without keys and values, over another layer's."""


def no_lap(name: str) -> None:
    """Time nothing."""


class Decoder:
    """The whole model, weights uninitialized, in the default dtype and device (see `loader.load_decoder`).

    weights: by `WeightKey`, where query, key and value are `qkv`, and a gate with its up `gate_up`. A tied `lm_head` is
    the embedding. scales: of each output of those that are int8.
    """

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.scales: dict[WeightKey, Tensor] = {}
        self._program = program_of(model)
        self._dtype = torch.get_default_dtype()
        #: Where each weight lies in a fused one.
        self._places: dict[WeightKey, tuple[WeightKey, slice]] = {}
        shapes: dict[WeightKey, tuple[int, ...]] = {}
        all_shapes = model_weights(model)
        for key, shape in all_shapes.items():
            is_alone = key._replace(name="gate") not in all_shapes and key.name == "up"
            fused = key if is_alone else key._replace(name=_FUSED_IN.get(key.name, key.name))
            first = shapes[fused][0] if fused in shapes else 0
            shapes[fused] = (first + shape[0], *shape[1:])
            self._places[key] = fused, slice(first, first + shape[0])
        self.weights = {
            key: torch.empty(shape, dtype=torch.float32 if key.name in FLOAT32_WEIGHTS else None)
            for key, shape in shapes.items()
        }
        if model.has_lm_head and _HEAD not in shapes:
            self.weights[_HEAD] = self.weights[_EMBEDDING]

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        head = self.weights.get(_HEAD)
        return head is not None and head is self.weights.get(_EMBEDDING)

    @property
    def embedding(self) -> Tensor:
        """The embedding of each token, [V, hidden_size]."""
        return self.weights[_EMBEDDING]

    @property
    def sinks(self) -> list[Tensor | None]:
        """The sinks of each layer's heads, [H]."""
        return [self.weights.get(WeightKey("sinks", layer, "weight")) for layer in range(self.model.num_layers)]

    def to_int8(self) -> None:
        """Allocate int8 matrices with their scales in place of floats, before any are loaded.

        An embedding that is not also `lm_head`, here or in another part of the model, is only looked up, and stays as
        it is.
        """
        is_tied = self.is_tied
        kept = {*LOOKED_UP, *FLOAT32_WEIGHTS}
        if self.model.tie_word_embeddings and not is_tied:
            kept.discard(_EMBEDDING.name)
        for key, matrix in self.weights.items():
            if matrix.dim() == 2 and key.name not in kept:
                num_out, num_in = matrix.shape
                self.weights[key] = matrix.new_empty(num_out, -(-num_in // BLOCK) * BLOCK, dtype=torch.int8)
                self.scales[key] = matrix.new_empty(num_out, dtype=torch.float32)
        if is_tied:
            self.weights[_EMBEDDING], self.scales[_EMBEDDING] = self.weights[_HEAD], self.scales[_HEAD]

    def target(self, key: WeightKey) -> tuple[Tensor, Tensor | None]:
        """Where a weight of `model_weights` is to be copied to, and the scales of its rows if it is int8."""
        fused, rows = self._places[key]
        scales = self.scales.get(fused)
        return self.weights[fused][rows], None if scales is None else scales[rows]

    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the matrices by the operation that multiplies by them, over all layers; of all experts together."""
        found: Counter[str] = Counter()
        for key, weight in self.weights.items():
            if key.kind == "weight" and key.name in LAPS:
                found["experts" if key.expert >= 0 else LAPS[key.name]] += weight.nbytes
        return dict(found)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        ropes: Sequence[RopeTable],
        attention: Attention,
        lap: Lap = no_lap,
        *,
        states: StepStates = NO_STATES,
        residual_TH: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the last layer, [T, hidden_size].

        positions_T: in the sequences. ropes: a table for each of `ModelSpec.ropes`, see `rope_tables`. states: of the
        layers that have one. residual_TH: what the stream begins with, of a model without an embedding.
        """
        rotations = [rope.at(positions_T) for rope in ropes]
        rows: dict[str, Tensor] = {} if residual_TH is None else {"residual": residual_TH}
        for operation in self._program:
            match operation:
                case Embed():
                    rows["residual"] = self.embed(token_ids_T, operation.multiplier)
                    lap("embed")
                case Inputs():
                    rows["inputs"] = self._layer_inputs(operation, token_ids_T, rows["normed"])
                    lap("layer_inputs")
                case Norm():
                    normed = self._norm(operation.weight, operation.layer, rows["residual"])
                    rows["normed"] = _scaled(normed, operation.multiplier)
                    lap("norm")
                case Take():
                    rows["normed"] = rows["residual"]
                case Heads():
                    qkv = self.multiply("qkv", operation.layer, rows["normed"])
                    lap("qkv_proj")
                    rotation = None if operation.rope < 0 else rotations[operation.rope]
                    queries, keys, values, gates = self._heads(operation, qkv, rotation, positions_T)
                    lap("rotary")
                case Attend():
                    attended = attention(operation.layer, queries, keys, values)
                    if operation.attention.has_output_gate:
                        attended = attended * gates.sigmoid()
                    rows["attended"] = attended.flatten(-2)
                    lap("attention")
                case Convolve():
                    mixed = self.multiply("mixed", operation.layer, rows["normed"])
                    lap("qkv_proj")
                    taps, bias = self._vector("taps", operation.layer), self.bias("taps", operation.layer)
                    convolved = convolve_gated(operation.convolution, mixed, taps, bias, states, operation.state)
                    rows["attended"] = convolved.to(mixed.dtype)
                    lap("recurrent")
                case Delta():
                    mixed = self.multiply("mixed", operation.layer, rows["normed"])
                    lap("qkv_proj")
                    rows["attended"] = self._delta(operation, mixed, rows["normed"], states)
                    lap("recurrent")
                case Activate():
                    rows["inner"] = self.activate(operation, rows["normed"])
                    lap("gate_up_proj")
                case ActivateInput():
                    gate = self.multiply("input_gate", operation.layer, rows["normed"])
                    rows["inner"] = activate(gate, operation.activation) * rows["inputs"][:, operation.layer]
                    lap("layer_inputs")
                case Multiply():
                    rows["update"] = self.multiply_out(operation.matrix, operation.layer, rows[operation.source])
                    lap(LAPS[operation.matrix])
                case MultiplyAdd():
                    update = self.multiply_out(operation.matrix, operation.layer, rows[operation.source])
                    rows["residual"] = rows["residual"] + _scaled(update, operation.multiplier)
                    lap(LAPS[operation.matrix])
                case AddNormed():
                    update = self._norm(operation.weight, operation.layer, rows["update"])
                    rows["residual"] = rows["residual"] + _scaled(update, operation.multiplier)
                    lap("norm")
                case Route():
                    products = self.multiply("router", operation.layer, rows["normed"].float())
                    correction = self.weights.get(WeightKey("correction", operation.layer, "weight"))
                    scale = self.weights.get(WeightKey("expert_scale", operation.layer, "weight"))
                    chosen = route(operation.experts, products, correction, scale)
                    lap("router")
                case ScaleInner():
                    products = self.multiply("shared_scale", operation.layer, rows["normed"].float())
                    rows["inner"] = rows["inner"] * products.sigmoid().to(rows["inner"].dtype)
                    lap("gate_up_proj")
                case Experts():
                    update = self.pass_experts(operation, rows["normed"], chosen)
                    is_alone = operation.experts.shared is None or operation.experts.has_norms
                    rows["update"] = update if is_alone else rows["update"] + update
                    lap("experts")
                case Add():
                    rows["residual"] = rows["residual"] + _scaled(rows["update"], operation.multiplier)
                    lap("experts")
                case Keep():
                    rows["kept"] = self._norm(operation.weight, operation.layer, rows["update"])
                    lap("norm")
                case AddKept():
                    rows["update"] = rows["kept"] + self._norm(operation.weight, operation.layer, rows["update"])
                    lap("norm")
                case Scale():
                    rows["residual"] = rows["residual"] * self._vector("layer_scale", operation.layer)
                    lap("norm")
        return rows["residual"]

    def norm(self, x: Tensor) -> Tensor:
        """The last norm, [S, hidden_size], of the residual stream of S tokens."""
        return self._norm("final_norm", 0, x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [S, V] of the residual stream of S tokens."""
        logits = _scaled(self.multiply("lm_head", 0, self.norm(x)), self.model.logits_multiplier)
        return cap_softly(logits, self.model.logits_soft_cap) if self.model.logits_soft_cap else logits

    def embed(self, token_ids_T: Tensor, multiplier: float) -> Tensor:
        """The embedding of each token times `multiplier`, [T, hidden_size]."""
        weight, scales = self.weights[_EMBEDDING], self.scales.get(_EMBEDDING)
        if scales is None:
            x = embedding(token_ids_T, weight)
        else:
            x = dequantize_rows(weight[token_ids_T], scales[token_ids_T], self.model.hidden_size).to(self._dtype)
        # The multiplier is rounded to the dtype, as transformers rounds it.
        return x if multiplier == 1.0 else x * torch.tensor(multiplier, dtype=x.dtype).item()

    def _layer_inputs(self, operation: Inputs, token_ids_T: Tensor, x: Tensor) -> Tensor:
        """[T, layers, size]."""
        size = operation.size
        projected = _scaled(self.multiply("inputs_projection", 0, x), operation.multiplier).unflatten(-1, (-1, size))
        looked_up: Tensor = self._vector("inputs_embedding", 0)[token_ids_T].unflatten(-1, (-1, size))
        looked_up = looked_up * torch.tensor(size**0.5, dtype=x.dtype).item()
        return (self._norm("inputs_norm", 0, projected) + looked_up) * math.sqrt(0.5)

    def _heads(
        self, operation: Heads, qkv: Tensor, rotation: Rotation | None, positions_T: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Queries [T, H, D], keys and values [T, K, D], normed and rotated, and gates [T, H or 0, D]."""
        spec, layer = operation.attention, operation.layer
        heads = qkv.unflatten(-1, (-1, spec.head_dim))
        num_gates = spec.num_heads if spec.has_output_gate else 0
        num_qk = spec.num_heads, spec.num_key_products
        qk, values, gates = heads.split((sum(num_qk), spec.num_value_products, num_gates), dim=1)
        queries, keys = qk.split(num_qk, dim=1)
        if spec.values_are_keys:
            values = keys
        if spec.has_value_norm:
            values = rms_norm(values, None, self.model.norm.eps)
        if spec.qk_norm != "none":
            if spec.qk_norm == "whole":
                queries, keys = queries.flatten(1), keys.flatten(1)
            queries = self._norm("query_norm", layer, queries)
            if spec.num_key_products:
                keys = self._norm("key_norm", layer, keys)
            qk = torch.cat((queries, keys), dim=1).view(qk.shape)
        if rotation is not None:
            qk = rotary_embedding(qk, *rotation)
        queries, keys = qk.split(num_qk, dim=1)
        if spec.query_scaling_beta and spec.rope is not None:
            num_stretches = positions_T // spec.rope.original_max_position_embeddings
            scaling = 1 + spec.query_scaling_beta * torch.log(1 + num_stretches.float())
            queries = queries * scaling.to(queries.dtype)[:, None, None]
        if spec.keys_of >= 0:
            return queries, None, None, gates
        return queries, keys, values, gates

    def _delta(self, operation: Delta, mixed: Tensor, normed: Tensor, states: StepStates) -> Tensor:
        spec, layer = operation.delta, operation.layer
        inputs, gates = mixed.split((spec.num_channels, spec.values_size), dim=-1)
        betas_TH = self.multiply("delta_beta", layer, normed.float()).sigmoid()
        rate, bias = self._vector("decay_rate", layer), self._vector("decay_shift", layer)
        decays_TH = decays_of(self.multiply("delta_decay", layer, normed.float()), rate, bias)
        weights = DeltaWeights(self._vector("delta_scale", layer), decays_TH, betas_TH)
        taps = self._vector("taps", layer)
        out = gated_delta(spec, inputs, taps, weights, states, operation.state, self.model.norm.eps)
        return (out * silu(gates.float())).to(mixed.dtype)

    def _vector(self, name: str, layer: int) -> Tensor:
        return self.weights[WeightKey(name, layer, "weight")]

    def activate(self, operation: Activate, x: Tensor, expert: int = -1) -> Tensor:
        """What the neurons of a part, or of an expert, give, [T, neurons]."""
        product = self.multiply(operation.matrix, operation.layer, x, expert)
        function = activate_gated if operation.matrix == "gate_up" else activate
        return function(product, operation.activation)

    def pass_experts(self, operation: Experts, x: Tensor, chosen: Chosen) -> Tensor:
        """What the experts of each token give, [T, hidden_size]."""
        spec = operation.experts
        first = activation_of(spec.expert, operation.layer)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, tokens, shares in chosen.groups(spec.num_experts):
            given = self.multiply("down", operation.layer, self.activate(first, x[tokens], expert), expert)
            out.index_add_(0, tokens, given * shares[:, None])
        return out.to(x.dtype)

    def multiply_out(self, name: str, layer: int, x: Tensor) -> Tensor:
        """As `multiply`, by the last matrix of a part of a layer, [T, hidden_size]."""
        return self.multiply(name, layer, x)

    def multiply(self, name: str, layer: int, x: Tensor, expert: int = -1) -> Tensor:
        """A matrix and its bias, if it has one, on x: [T, out] of [T, in]."""
        key = WeightKey(name, layer, "weight", expert)
        weight, scales, bias = self.weights[key], self.scales.get(key), self.bias(name, layer, expert)
        return linear(x, weight, bias) if scales is None else int8_linear(x, weight, scales, bias)

    def _norm(self, name: str, layer: int, x: Tensor) -> Tensor:
        spec, weight, bias = (
            self.model.norm,
            self.weights.get(WeightKey(name, layer, "weight")),
            self.bias(name, layer),
        )
        dtype = x.dtype
        if spec.offset and weight is not None:
            x, weight = x.float(), weight.float() + spec.offset
            bias = None if bias is None else bias.float()
        out = rms_norm(x, weight, spec.eps) if spec.kind == "rms" else layer_norm(x, weight, bias, spec.eps)
        return out.to(dtype)

    def bias(self, name: str, layer: int, expert: int = -1) -> Tensor | None:
        """Of a product or a norm; None if it has none."""
        return self.weights.get(WeightKey(name, layer, "bias", expert))


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier
