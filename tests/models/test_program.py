from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.models.program import (
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
    Operation,
    Route,
    Scale,
    ScaleInner,
    Take,
    program_of,
)
from eventlm.models.spec import ConvolutionSpec, DeltaSpec, ExpertsSpec, FeedForwardSpec, LayerInputsSpec, ModelSpec
from tests.models.test_decoder import ATTENTION, LAYER, MODEL, ROPE, with_layers

HEADS, ATTEND, ACTIVATE = Heads(0, ATTENTION, 0), Attend(0, ATTENTION), Activate(0, "gate_up", "silu")
LAYERS: dict[str, list[Operation]] = {
    "before": [
        Norm("attention_norm", 0),
        HEADS,
        ATTEND,
        MultiplyAdd("output", 0, "attended", 0.5),
        Norm("feed_forward_norm", 0),
        ACTIVATE,
        MultiplyAdd("down", 0, "inner", 0.5),
    ],
    "after": [
        Take(),
        HEADS,
        ATTEND,
        Multiply("output", 0, "attended"),
        AddNormed("attention_out_norm", 0, 0.5),
        Take(),
        ACTIVATE,
        Multiply("down", 0, "inner"),
        AddNormed("feed_forward_out_norm", 0, 0.5),
    ],
    "both": [
        Norm("attention_norm", 0),
        HEADS,
        ATTEND,
        Multiply("output", 0, "attended"),
        AddNormed("attention_out_norm", 0, 0.5),
        Norm("feed_forward_norm", 0),
        ACTIVATE,
        Multiply("down", 0, "inner"),
        AddNormed("feed_forward_out_norm", 0, 0.5),
    ],
    "parallel": [
        Norm("attention_norm", 0),
        HEADS,
        ACTIVATE,
        ATTEND,
        MultiplyAdd("output", 0, "attended", 0.5),
        MultiplyAdd("down", 0, "inner", 0.5),
    ],
}


@pytest.mark.parametrize("norms", LAYERS)
def test_a_layer_by_where_its_norms_are(norms: str) -> None:
    model = with_layers(norms=norms, residual_multiplier=0.5)
    model = structs.replace(model, layers=model.layers[:1], embedding_multiplier=2.0)
    assert program_of(model) == (Embed(2.0), *LAYERS[norms])


def test_layers_that_differ() -> None:
    other_rope = structs.replace(ATTENTION, rope=structs.replace(ROPE, theta=5.0))
    no_rope = structs.replace(ATTENTION, rope=None)
    ungated = FeedForwardSpec(size=24, activation="relu2", is_gated=False)
    layers = (
        LAYER,
        structs.replace(LAYER, attention=other_rope),
        structs.replace(LAYER, attention=no_rope, feed_forward=ungated),
        LAYER,
    )
    program = program_of(structs.replace(MODEL, layers=layers))
    assert [each for each in program if isinstance(each, Heads)] == [
        Heads(0, ATTENTION, 0),
        Heads(1, other_rope, 1),
        Heads(2, no_rope, -1),
        Heads(3, ATTENTION, 0),
    ]
    assert [each.matrix for each in program if isinstance(each, Activate)] == ["gate_up", "gate_up", "up", "gate_up"]
    assert Activate(2, "up", "relu2") in program


@pytest.mark.parametrize("norms", LAYERS)
@pytest.mark.parametrize("has_shared", [False, True])
def test_experts_follow_the_part_that_all_tokens_pass(norms: str, *, has_shared: bool) -> None:
    shared = FeedForwardSpec(size=24, activation="relu2", is_gated=False) if has_shared else None
    experts = ExpertsSpec(
        num_experts=4,
        num_active=2,
        expert=FeedForwardSpec(size=9),
        shared=shared,
        has_shared_gate=has_shared,
    )
    model = with_layers(norms=norms, residual_multiplier=0.5)
    layer = structs.replace(model.layers[0], feed_forward=experts)
    _, *program = program_of(structs.replace(model, layers=(layer,)))
    dense = [Activate(0, "up", "relu2"), ScaleInner(0), Multiply("down", 0, "inner")] if has_shared else []
    add = Add(0.5) if norms in ("before", "parallel") else AddNormed("feed_forward_out_norm", 0, 0.5)
    expected: list[Operation] = [Route(0, experts), *dense, Experts(0, experts), add]
    if norms == "parallel":
        assert program[2:5] == [expected[0], ATTEND, MultiplyAdd("output", 0, "attended", 0.5)]
        assert program[5:] == expected[1:]
    else:
        assert program[-len(expected) :] == expected


def test_a_layer_of_gemma_4() -> None:
    shared, expert = FeedForwardSpec(size=24), FeedForwardSpec(size=9)
    experts = ExpertsSpec(
        num_experts=4, num_active=2, expert=expert, shared=shared, has_norms=True, router_multiplier=0.5
    )
    layer = structs.replace(LAYER, feed_forward=experts, norms="both", has_scale=True)
    inputs = LayerInputsSpec(size=6, vocab_size=50, activation="gelu")
    program = program_of(structs.replace(MODEL, layers=(layer,), layer_inputs=inputs))
    assert program[:3] == (Embed(1.0), Take(), Inputs(6, MODEL.hidden_size**-0.5))
    assert program[program.index(Norm("feed_forward_norm", 0)) + 1 :] == (
        Activate(0, "gate_up", "silu"),
        Multiply("down", 0, "inner"),
        Keep("shared_out_norm", 0),
        Norm("router_norm", 0, 0.5),
        Route(0, experts),
        Norm("experts_norm", 0),
        Experts(0, experts),
        AddKept("experts_out_norm", 0),
        AddNormed("feed_forward_out_norm", 0, 1.0),
        Take(),
        ActivateInput(0, 6, "gelu"),
        Multiply("input_up", 0, "inner"),
        AddNormed("input_out_norm", 0, 1.0),
        Scale(0),
    )


def test_states_follow_one_another_in_a_slot() -> None:
    convolution = ConvolutionSpec(num_channels=32, num_taps=3)
    delta = DeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, num_taps=4)
    others = [structs.replace(LAYER, attention=None, recurrent=each) for each in (convolution, delta, convolution)]
    model = structs.replace(MODEL, layers=(others[0], LAYER, *others[1:]))
    program = program_of(model)
    sizes = 2 * 32, 3 * (2 * 6 + 20) + 4 * 3 * 5
    assert [each for each in program if isinstance(each, Convolve | Delta)] == [
        Convolve(0, convolution, 0),
        Delta(2, delta, sizes[0]),
        Convolve(3, convolution, sum(sizes)),
    ]
    assert model.state_size == sum(sizes) + sizes[0]
    assert program[1:4] == (
        Norm("attention_norm", 0),
        Convolve(0, convolution, 0),
        MultiplyAdd("output", 0, "attended", 1.0),
    )


def test_ropes_are_listed_once_however_many_layers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    other = structs.replace(LAYER, attention=structs.replace(ATTENTION, rope=structs.replace(ROPE, theta=5.0)))
    none = structs.replace(LAYER, attention=structs.replace(ATTENTION, rope=None))
    model = structs.replace(MODEL, layers=(other, none, LAYER, other))
    listed = []
    list_ropes = ModelSpec.ropes.fget
    monkeypatch.setattr(ModelSpec, "ropes", property(lambda self: listed.append(1) or list_ropes(self)))
    heads = [operation.rope for operation in program_of(model) if isinstance(operation, Heads)]
    assert heads == [0, -1, 1, 0]
    assert len(listed) == 1
