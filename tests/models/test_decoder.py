"""The decoder against one in float64 that is written down from `ModelSpec`, without a program or fused weights."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn.functional import gelu
from transformers.activations import ACT2FN

from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.decoder import Decoder, Lap, no_lap
from eventlm.models.program import FLOAT32_WEIGHTS, LOOKED_UP, WeightKey
from eventlm.models.rope import rope_tables
from eventlm.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from eventlm.models.weights.decoder_weights import model_weights
from tests.kernels.cpu.decoders import relative_error

NUM_TOKENS = 21
ROPE = RopeSpec(rotary_dim=8)
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=ROPE, scale=8**-0.5)
LAYER = LayerSpec(attention=ATTENTION, feed_forward=FeedForwardSpec(size=40))
MODEL = ModelSpec(
    architecture="",
    vocab_size=61,
    hidden_size=32,
    layers=(LAYER, LAYER),
    norm=NormSpec(eps=1e-5),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype="float32",
)
Weights = dict[WeightKey, Tensor]


def with_layers(*, attention: Any = None, feed_forward: Any = None, **layer: Any) -> ModelSpec:
    """Both layers changed."""
    changed = structs.replace(
        LAYER,
        attention=structs.replace(ATTENTION, **(attention or {})),
        feed_forward=structs.replace(LAYER.feed_forward, **(feed_forward or {})),
        **layer,
    )
    return structs.replace(MODEL, layers=(changed, changed))


def with_experts(*, norms: Literal["before", "after", "both", "parallel"] = "before", **spec: Any) -> ModelSpec:
    """A dense layer, then two with six experts."""
    experts = ExpertsSpec(**{"num_experts": 6, "num_active": 2, "expert": FeedForwardSpec(size=24)} | spec)
    layer = structs.replace(LAYER, feed_forward=experts, norms=norms, residual_multiplier=0.4)
    return structs.replace(MODEL, layers=(LAYER, layer, layer))


def with_norm(model: ModelSpec, **norm: Any) -> ModelSpec:
    return structs.replace(model, norm=NormSpec(eps=1e-5, **norm))


MODELS = {
    "plain": MODEL,
    "tied": structs.replace(MODEL, tie_word_embeddings=True),
    "all biases": structs.replace(
        with_layers(attention={"has_qkv_bias": True, "has_output_bias": True}, feed_forward={"has_bias": True}),
        has_head_bias=True,
    ),
    "head norms": with_layers(attention={"qk_norm": "head"}),
    "whole norms": with_layers(attention={"qk_norm": "whole"}),
    "offset": with_norm(with_layers(attention={"qk_norm": "head"}), offset=1.0),
    "layer norms": with_norm(with_layers(attention={"qk_norm": "head"}), kind="layer", has_bias=True),
    "layer norms with an offset": with_norm(MODEL, kind="layer", has_bias=True, offset=1.0),
    "norms without weights": with_norm(MODEL, kind="layer", has_weight=False),
    "norms after": with_layers(norms="after"),
    "norms before and after": with_layers(norms="both", residual_multiplier=0.4),
    "parallel": with_layers(norms="parallel", residual_multiplier=0.4),
    "interleaved": with_layers(attention={"rope": structs.replace(ROPE, is_interleaved=True)}),
    "partial": with_layers(attention={"rope": structs.replace(ROPE, rotary_dim=4)}),
    "partial and interleaved": with_layers(
        attention={"rope": structs.replace(ROPE, rotary_dim=4, is_interleaved=True)}
    ),
    "no rope": with_layers(attention={"rope": None}),
    "scaled queries": with_layers(
        attention={
            "rope": structs.replace(ROPE, original_max_position_embeddings=8),
            "query_scaling_beta": 0.5,
            "scale": 0.2,
        }
    ),
    "gelu": with_layers(feed_forward={"activation": "gelu"}),
    "gelu_tanh": with_layers(feed_forward={"activation": "gelu_tanh"}),
    "ungated": with_layers(feed_forward={"activation": "relu2", "is_gated": False, "has_bias": True}),
    "multipliers": structs.replace(MODEL, embedding_multiplier=5.5, logits_multiplier=0.25, logits_soft_cap=0.5),
    "experts": with_experts(),
    "experts, not normalized": with_experts(is_normalized=False, scaling=2.5, num_active=1),
    "experts of OpenAI's": with_experts(
        expert=FeedForwardSpec(size=24, activation="swiglu_oai", has_bias=True), has_router_bias=True, num_active=3
    ),
    "experts without gates": with_experts(
        norms="parallel",
        expert=FeedForwardSpec(size=24, is_gated=False, activation="relu2", has_bias=True),
        shared=FeedForwardSpec(size=40, is_gated=False, activation="gelu", has_bias=True),
    ),
    "experts in groups": with_experts(
        norms="after",
        routing="sigmoid",
        has_correction=True,
        num_groups=3,
        num_active_groups=2,
        num_active=3,
        min_sum=1.4,
        shared=FeedForwardSpec(size=40),
        has_shared_gate=True,
    ),
    "gemma 4": structs.replace(
        MODEL,
        layers=tuple(
            structs.replace(LAYER, attention=structs.replace(ATTENTION, **changes), norms="both", has_scale=True)
            for changes in (
                {"has_value_norm": True, "qk_norm": "head"},
                {"has_value_norm": True, "values_are_keys": True, "scale": 0.3},
                {"keys_of": 0, "qk_norm": "head"},
                {"keys_of": 1, "qk_norm": "whole"},
            )
        ),
        layer_inputs=LayerInputsSpec(size=6, vocab_size=MODEL.vocab_size + 1, activation="gelu_tanh"),
    ),
    "experts of Gemma 4": with_experts(
        norms="both",
        shared=FeedForwardSpec(size=40),
        has_norms=True,
        has_scales=True,
        router_multiplier=0.7,
    ),
    "layers that differ": structs.replace(
        MODEL,
        layers=(
            LAYER,
            structs.replace(
                LAYER,
                attention=structs.replace(ATTENTION, rope=structs.replace(ROPE, theta=100.0), scale=0.7),
                feed_forward=FeedForwardSpec(size=24, is_gated=False),
                norms="parallel",
            ),
            structs.replace(LAYER, attention=structs.replace(ATTENTION, rope=None)),
        ),
    ),
}


def random_weights(model: ModelSpec) -> Weights:
    generator = torch.Generator().manual_seed(3)
    return {
        key: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
        for key, shape in model_weights(model).items()
    }


def decoder_of(
    model: ModelSpec, weights: Weights, dtype: torch.dtype = torch.float32, *, is_int8: bool = False
) -> Decoder:
    torch.set_default_dtype(dtype)
    try:
        decoder = Decoder(model)
    finally:
        torch.set_default_dtype(torch.float32)
    if is_int8:
        decoder.to_int8()
    for key, values in weights.items():
        target, scales = decoder.target(key)
        if scales is None:
            target.copy_(values)
        else:
            target[:], scales[:] = quantize_rows(values)
    return decoder


def attend(spec: AttentionSpec, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Causally; what else a layer's attention can have is `paged_attention`'s."""
    group = spec.num_heads // spec.num_kv_heads
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    scores = torch.einsum("nhd,lhd->hnl", q_THD, k_THD) * spec.scale
    hidden = torch.ones(len(q_THD), len(q_THD)).triu(1).bool()
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_THD)


class Reference:
    """In float64."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        self.model = model
        self.weights = {key: values.double() for key, values in weights.items()}
        #: Keys and values of layers.
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def multiply(self, name: str, layer: int, x: Tensor, expert: int = -1) -> Tensor:
        out = x @ self.weights[WeightKey(name, layer, "weight", expert)].T
        return out + self.weights.get(WeightKey(name, layer, "bias", expert), 0)

    def norm(self, name: str, layer: int, x: Tensor) -> Tensor:
        spec = self.model.norm
        if spec.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt()
        if spec.has_weight:
            x = x * (self.weights[WeightKey(name, layer, "weight")] + spec.offset)
        return x + self.weights.get(WeightKey(name, layer, "bias"), 0)

    def hidden(self, token_ids_T: Tensor) -> Tensor:
        x = self.model.embedding_multiplier * self.weights[WeightKey("embedding", 0, "weight")][token_ids_T]
        inputs = self.inputs(token_ids_T, x)
        for number, layer in enumerate(self.model.layers):
            is_normed_before, is_normed_after = layer.norms != "after", layer.norms in ("after", "both")
            first = self.norm("attention_norm", number, x) if is_normed_before else x
            attended = self.multiply("output", number, self.attended(number, layer.attention, first))
            if is_normed_after:
                attended = self.norm("attention_out_norm", number, attended)
            x = x + layer.residual_multiplier * attended
            second = first
            if layer.norms != "parallel":
                second = self.norm("feed_forward_norm", number, x) if is_normed_before else x
            if layer.experts is not None and layer.experts.has_norms:
                fed = self.fed_apart(number, layer.experts, x)
            else:
                fed = self.fed(number, layer.feed_forward, second)
            if is_normed_after:
                fed = self.norm("feed_forward_out_norm", number, fed)
            x = x + layer.residual_multiplier * fed
            if inputs is not None:
                gate = gelu(self.multiply("input_gate", number, x), approximate="tanh") * inputs[:, number]
                x = x + self.norm("input_out_norm", number, self.multiply("input_up", number, gate))
            if layer.has_scale:
                x = x * self.weights[WeightKey("layer_scale", number, "weight")]
        return x

    def inputs(self, token_ids_T: Tensor, x: Tensor) -> Tensor | None:
        """[T, layers, size]."""
        if self.model.layer_inputs is None:
            return None
        sizes = self.model.num_layers, self.model.layer_inputs.size
        looked_up = self.weights[WeightKey("inputs_embedding", 0, "weight")][token_ids_T].unflatten(-1, sizes)
        projected = (self.multiply("inputs_projection", 0, x) / self.model.hidden_size**0.5).unflatten(-1, sizes)
        return (self.norm("inputs_norm", 0, projected) + sizes[1] ** 0.5 * looked_up) / 2**0.5

    def fed_apart(self, layer: int, spec: ExpertsSpec, x: Tensor) -> Tensor:
        """The shared part and the experts of the residual stream, each with norms of its own."""
        shared = self.fed(layer, spec.shared, self.norm("feed_forward_norm", layer, x))
        products = self.multiply("router", layer, spec.router_multiplier * self.norm("router_norm", layer, x))
        rows = zip(self.norm("experts_norm", layer, x), products, strict=True)
        mixed = torch.stack([self.mixed_by(layer, spec, row, of_row) for row, of_row in rows])
        return self.norm("shared_out_norm", layer, shared) + self.norm("experts_out_norm", layer, mixed)

    def attended(self, layer: int, spec: AttentionSpec, x: Tensor) -> Tensor:
        q = self.query_or_key("query", layer, spec, x)
        if spec.keys_of < 0:
            v = self.multiply("key" if spec.values_are_keys else "value", layer, x).unflatten(-1, (-1, spec.head_dim))
            if spec.has_value_norm:
                v = v / (v.square().mean(-1, keepdim=True) + self.model.norm.eps).sqrt()
            self.stored[layer] = self.query_or_key("key", layer, spec, x), v
        if spec.rope is not None and spec.query_scaling_beta:
            stretches = torch.arange(len(x)).double() // spec.rope.original_max_position_embeddings
            q = q * (1 + spec.query_scaling_beta * (1 + stretches).log())[:, None, None]
        return attend(spec, q, *self.stored[layer if spec.keys_of < 0 else spec.keys_of]).flatten(1)

    def query_or_key(self, name: str, layer: int, spec: AttentionSpec, x: Tensor) -> Tensor:
        x = self.multiply(name, layer, x)
        if spec.qk_norm == "whole":
            x = self.norm(f"{name}_norm", layer, x)
        x = x.unflatten(-1, (-1, spec.head_dim))
        if spec.qk_norm == "head":
            x = self.norm(f"{name}_norm", layer, x)
        return x if spec.rope is None else rotated(spec.rope, x)

    def fed(self, layer: int, spec: FeedForwardSpec | ExpertsSpec, x: Tensor, expert: int = -1) -> Tensor:
        if isinstance(spec, ExpertsSpec):
            return torch.stack([self.mixed(layer, spec, row) for row in x])
        up = self.multiply("up", layer, x, expert)
        if spec.activation == "swiglu_oai":
            gate, up = self.multiply("gate", layer, x, expert).clamp(max=7), up.clamp(-7, 7)
            return self.multiply("down", layer, (up + 1) * gate * (1.702 * gate).sigmoid(), expert)
        activation = ACT2FN["gelu_pytorch_tanh" if spec.activation == "gelu_tanh" else spec.activation]
        inner = activation(self.multiply("gate", layer, x, expert)) * up if spec.is_gated else activation(up)
        return self.multiply("down", layer, inner, expert)

    def mixed(self, layer: int, spec: ExpertsSpec, row: Tensor) -> Tensor:
        """Of a token."""
        out = self.mixed_by(layer, spec, row, self.multiply("router", layer, row))
        if spec.shared is not None:
            scale = self.multiply("shared_scale", layer, row).sigmoid() if spec.has_shared_gate else 1.0
            out += self.fed(layer, spec.shared, row) * scale
        return out

    def mixed_by(self, layer: int, spec: ExpertsSpec, row: Tensor, products: Tensor) -> Tensor:
        """The experts of a token by the router's products."""
        shares = (products.softmax(-1) if spec.routing == "softmax" else products.sigmoid()).tolist()
        correction = self.weights.get(WeightKey("correction", layer, "weight"), torch.zeros(spec.num_experts))
        ranked = [share + added for share, added in zip(shares, correction.tolist(), strict=True)]
        size = spec.num_experts // spec.num_groups
        groups = [range(first, first + size) for first in range(0, spec.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted(ranked[expert] for expert in group)[-2:]))
        allowed = [expert for group in groups[: spec.num_active_groups] for expert in group]
        chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: spec.num_active]
        divisor = max(sum(shares[expert] for expert in chosen), spec.min_sum) if spec.is_normalized else 1.0
        scales = self.weights.get(WeightKey("expert_scale", layer, "weight"), torch.ones(spec.num_experts))
        out = torch.zeros_like(row)
        for expert in chosen:
            out += self.fed(layer, spec.expert, row, expert) * shares[expert] / divisor * spec.scaling * scales[expert]
        return out

    def logits(self, hidden_TH: Tensor) -> Tensor:
        head = "embedding" if self.model.tie_word_embeddings else "lm_head"
        logits = self.multiply(head, 0, self.norm("final_norm", 0, hidden_TH))
        logits = logits * self.model.logits_multiplier
        cap = self.model.logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits


def rotated(rope: RopeSpec, x_THD: Tensor) -> Tensor:
    """Each pair of elements as a complex number, turned."""
    pairs = torch.arange(rope.rotary_dim // 2)
    frequencies = rope.theta ** (-2 * pairs.double() / rope.rotary_dim)
    turns = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(len(x_THD)).double(), frequencies))[:, None]
    first, second = (2 * pairs, 2 * pairs + 1) if rope.is_interleaved else (pairs, pairs + rope.rotary_dim // 2)
    turned = torch.complex(x_THD[..., first], x_THD[..., second]) * turns
    out = x_THD.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def run(decoder: Decoder, token_ids_T: Tensor, lap: Lap = no_lap) -> tuple[Tensor, Tensor]:
    """The residual stream of a sequence, and the logits."""
    model = decoder.model
    ropes = rope_tables(model, NUM_TOKENS, dtype=torch.float32, device=torch.device("cpu"))

    stored: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
        spec = model.layers[layer].attention
        if k_TKD is not None and v_TKD is not None:
            stored[layer] = k_TKD, v_TKD
        return attend(spec, q_THD, *stored[layer if spec.keys_of < 0 else spec.keys_of])

    hidden_TH = decoder.forward(token_ids_T, torch.arange(len(token_ids_T)), ropes, attention, lap)
    return hidden_TH, decoder.logits(hidden_TH)


@pytest.fixture
def token_ids_T() -> Tensor:
    return torch.randint(MODEL.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_against_float64(name: str, token_ids_T: Tensor) -> None:
    model = MODELS[name]
    weights = random_weights(model)
    reference = Reference(model, weights)
    expected_TH = reference.hidden(token_ids_T)
    hidden_TH, logits_TV = run(decoder_of(model, weights), token_ids_T)
    torch.testing.assert_close(hidden_TH.double(), expected_TH, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits_TV.double(), reference.logits(expected_TH), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_int8_is_near(name: str, token_ids_T: Tensor) -> None:
    model = MODELS[name]
    weights = random_weights(model)
    decoder = decoder_of(model, weights, is_int8=True)
    for key in weights:
        target, scales = decoder.target(key)
        is_looked_up = key.name in LOOKED_UP and not (key.name == "embedding" and model.tie_word_embeddings)
        is_matrix = target.dim() == 2 and not is_looked_up and key.name not in FLOAT32_WEIGHTS
        assert (target.dtype, scales is not None) == ((torch.int8, True) if is_matrix else (torch.float32, False))
    reference = Reference(model, weights)
    expected_TV = reference.logits(reference.hidden(token_ids_T))
    _, logits_TV = run(decoder, token_ids_T)
    assert relative_error(logits_TV, expected_TV.float()) < 0.05


def test_an_embedding_is_scaled_by_the_multiplier_as_its_dtype_has_it() -> None:
    model = structs.replace(MODEL, embedding_multiplier=1152**0.5, layers=())
    weights = random_weights(model)
    hidden_TH, _ = run(decoder_of(model, weights, torch.bfloat16), torch.arange(5))
    assert torch.equal(hidden_TH, weights[WeightKey("embedding", 0, "weight")][:5].bfloat16() * 34)


def test_matrices_of_one_product_lie_in_one() -> None:
    weights = random_weights(MODELS["all biases"])
    decoder = decoder_of(MODELS["all biases"], weights)
    for fused, names in {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}.items():
        for key in (WeightKey(fused, 1, "weight"), WeightKey(fused, 1, "bias")):
            parts = [weights[key._replace(name=name)] for name in names]
            assert torch.equal(decoder.weights[key], torch.cat(parts))


def test_sinks_are_those_of_the_layers_that_have_them() -> None:
    layer = structs.replace(LAYER, attention=structs.replace(ATTENTION, has_sinks=True))
    model = structs.replace(MODEL, layers=(LAYER, layer))
    weights = random_weights(model)
    none, sinks_H = decoder_of(model, weights).sinks
    assert none is None
    assert sinks_H is not None
    assert torch.equal(sinks_H, weights[WeightKey("sinks", 1, "weight")])


@pytest.mark.parametrize("name", ["plain", "tied", "ungated", "layers that differ", "experts", "experts in groups"])
def test_bytes_are_those_of_the_matrices(name: str) -> None:
    model = MODELS[name]
    decoder = Decoder(model)
    parts = decoder.weight_bytes()
    shapes = model_weights(model)
    num_matrix_weights = sum(
        math.prod(shape) for key, shape in shapes.items() if len(shape) == 2 and key.name != "shared_scale"
    )
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    assert sum(parts.values()) == 4 * (num_matrix_weights - looked_up)
    assert parts["o_proj"] == 4 * len(model.layers) * 32 * 32
    assert parts["lm_head"] == 4 * 61 * 32
    num_sparse = sum(layer.experts is not None for layer in model.layers)
    assert parts.get("experts", 0) == 4 * num_sparse * 6 * 3 * 24 * 32
    assert parts.get("router", 0) == 4 * num_sparse * 6 * 32


def test_each_operation_ends_with_its_name(token_ids_T: Tensor) -> None:
    laps: list[str] = []
    model = structs.replace(MODELS["norms before and after"], layers=(MODELS["norms before and after"].layers[0],))
    run(decoder_of(model, random_weights(model)), token_ids_T, laps.append)
    assert laps == [
        *("embed", "norm", "qkv_proj", "rotary", "attention", "o_proj", "norm"),
        *("norm", "gate_up_proj", "down_proj", "norm"),
    ]


def test_a_mixture_of_experts_ends_with_names_of_its_own(token_ids_T: Tensor) -> None:
    laps: list[str] = []
    model = structs.replace(MODELS["experts in groups"], layers=MODELS["experts in groups"].layers[2:])
    run(decoder_of(model, random_weights(model)), token_ids_T, laps.append)
    # The shared part, with its gate, then the experts.
    assert laps[6:] == ["router", "gate_up_proj", "gate_up_proj", "down_proj", "experts", "norm"]


def test_routers_stay_in_float32() -> None:
    model = MODELS["experts in groups"]
    decoder = decoder_of(model, random_weights(model), torch.bfloat16)
    kept = {key.name for key, weight in decoder.weights.items() if weight.dtype == torch.float32}
    assert kept == {key.name for key in decoder.weights if key.name in FLOAT32_WEIGHTS}


@pytest.mark.parametrize("name", ["experts", "experts in groups"])
def test_what_a_token_s_experts_give_does_not_depend_on_other_tokens(name: str, token_ids_T: Tensor) -> None:
    model = MODELS[name]
    decoder = decoder_of(model, random_weights(model))
    all_TH, _ = run(decoder, token_ids_T)
    for num_tokens in (1, 2, 13):
        few_TH, _ = run(decoder, token_ids_T[:num_tokens])
        torch.testing.assert_close(few_TH, all_TH[:num_tokens], atol=1e-6, rtol=1e-6)
