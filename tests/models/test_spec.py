from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.models.spec import (
    ConvolutionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    NormSpec,
    RopeSpec,
    why_not_on_gpus,
    why_not_plain,
)
from tests.models.test_decoder import ATTENTION, LAYER, MODEL, ROPE, with_layers


def test_what_layers_share_is_read_from_them() -> None:
    second = structs.replace(
        LAYER,
        attention=structs.replace(ATTENTION, rope=structs.replace(ROPE, theta=5.0)),
    )
    third = structs.replace(LAYER, attention=structs.replace(ATTENTION, rope=None))
    model = structs.replace(MODEL, layers=(LAYER, second, third, LAYER))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (4, 4, 2, 8)
    assert [rope.theta for rope in model.ropes] == [ROPE.theta, 5.0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": {"qk_norm": "head", "has_qkv_bias": True}, "feed_forward": {"has_bias": True}},
        {"attention": {"rope": RopeSpec(type="yarn", factor=4.0, rotary_dim=8, attention_factor=1.1)}},
    ],
)
def test_plain_ones(changes: dict[str, Any]) -> None:
    assert why_not_plain(with_layers(**changes)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": {"window": 8}}, "sliding windows"),
        ({"attention": {"has_sinks": True}}, "soft caps or sinks"),
        ({"attention": {"qk_norm": "whole"}}, "a norm over all heads together"),
        ({"attention": {"scale": 1.0}}, "attention scores of a scale of their own"),
        ({"attention": {"rope": None}}, "layers without rotary embeddings"),
        ({"attention": {"has_output_gate": True}}, "gates behind attention"),
        ({"attention": {"has_value_norm": True}}, "values that are normed or are the keys"),
        ({"attention": {"values_are_keys": True}}, "values that are normed or are the keys"),
        ({"attention": {"keys_of": 0}}, "layers that share keys and values"),
        ({"has_scale": True}, "layers with inputs or scales of their own"),
        (
            {"attention": {"rope": RopeSpec(rotary_dim=4)}},
            "rotary embeddings of neighbouring elements or of a part of a head",
        ),
        (
            {"attention": {"rope": RopeSpec(type="proportional", rotary_dim=8, num_pairs=2)}},
            "rotary embeddings of neighbouring elements or of a part of a head",
        ),
        ({"feed_forward": {"activation": "gelu"}}, "the activation gelu"),
        ({"feed_forward": {"is_gated": False}}, "the activation silu without a gate"),
        ({"norms": "both"}, "norms or multipliers after the parts of a layer"),
    ],
)
def test_layers_that_are_not_plain(changes: dict[str, Any], reason: str) -> None:
    assert why_not_plain(with_layers(**changes)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": NormSpec(eps=1e-5, offset=1.0)}, "norms of another kind"),
        ({"norm": NormSpec(eps=1e-5, kind="layer")}, "norms of another kind"),
        ({"logits_soft_cap": 30.0}, "scaled or capped embeddings or logits"),
        ({"has_head_bias": True}, "a bias of the output matrix"),
        (
            {"layer_inputs": LayerInputsSpec(size=4, vocab_size=50, activation="silu")},
            "layers with inputs or scales of their own",
        ),
    ],
)
def test_models_that_are_not_plain(changes: dict[str, Any], reason: str) -> None:
    assert why_not_plain(structs.replace(MODEL, **changes)) == reason


def test_experts_are_not_plain() -> None:
    experts = ExpertsSpec(num_experts=4, num_active=2, expert=FeedForwardSpec(size=9))
    layer = structs.replace(LAYER, feed_forward=experts)
    assert why_not_plain(structs.replace(MODEL, layers=(LAYER, layer))) == "a mixture of experts"
    assert (LAYER.experts, LAYER.dense) == (None, LAYER.feed_forward)
    assert (layer.experts, layer.dense) == (experts, None)
    shared = structs.replace(experts, shared=FeedForwardSpec(size=7))
    assert structs.replace(layer, feed_forward=shared).dense == FeedForwardSpec(size=7)


def test_heads_that_differ_are_not_plain() -> None:
    for changes in ({"num_kv_heads": 4}, {"num_heads": 8}):
        other = structs.replace(LAYER, attention=structs.replace(ATTENTION, **changes))
        model = structs.replace(MODEL, layers=(LAYER, other))
        assert why_not_plain(model) == why_not_on_gpus(model) == "heads that differ by layer"


def test_keys_of_an_earlier_layer_are_not_for_gpus() -> None:
    sharing = structs.replace(LAYER, attention=structs.replace(ATTENTION, keys_of=0))
    model = structs.replace(MODEL, layers=(LAYER, sharing))
    assert why_not_plain(model) == why_not_on_gpus(model) == "layers that share keys and values"


def test_ropes_that_differ_are_not_plain() -> None:
    other = structs.replace(LAYER, attention=structs.replace(ATTENTION, rope=structs.replace(ROPE, theta=5.0)))
    model = structs.replace(MODEL, layers=(LAYER, other))
    assert (why_not_plain(model), why_not_on_gpus(model)) == ("rotary embeddings that differ by layer", "")


def test_states_are_not_plain() -> None:
    layer = structs.replace(LAYER, attention=None, recurrent=ConvolutionSpec(num_channels=64, num_taps=3))
    model = structs.replace(MODEL, layers=(layer, LAYER))
    assert why_not_plain(model) == why_not_on_gpus(model) == "layers with a state in place of attention"
    assert model.attention == ATTENTION
    assert (layer.kv_shape, model.state_size) == (None, 128)
