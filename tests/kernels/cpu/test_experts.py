"""Mixtures of experts: the choice of each token is torch's, and what they give is as near to float32 as the rest."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from eventlm.kernels.cpu import native
from eventlm.models.experts import route
from eventlm.models.program import WeightKey
from eventlm.models.spec import ExpertsSpec, FeedForwardSpec
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Computed,
    Piece,
    TorchDecoder,
    Weighted,
    only,
    random_sequences,
    random_steps,
    relative_error,
    scattered_tables,
    with_random_weights,
)
from tests.kernels.cpu.test_packed import with_blocks
from tests.kernels.cpu.test_programs import LAYER, TILED, model

BUILDS_HERE = native.available_builds()
EXPERT = FeedForwardSpec(size=48)


def experts(num_experts: int, num_active: int, expert: FeedForwardSpec = EXPERT, **changes: Any) -> ExpertsSpec:
    return ExpertsSpec(num_experts=num_experts, num_active=num_active, expert=expert, **changes)


#: Neurons that fill no panel, fewer experts than a product takes at once and more, and layers without any beside them.
MODELS = {
    "qwen 2": model(
        structs.replace(
            LAYER, feed_forward=experts(11, 3, shared=FeedForwardSpec(size=100), has_shared_gate=True, scaling=1.5)
        ),
        structs.replace(LAYER, feed_forward=experts(2, 1, FeedForwardSpec(size=33))),
        LAYER,
    ),
    "glm 4.5, its norms after too": model(
        structs.replace(
            LAYER,
            norms="both",
            residual_multiplier=0.5,
            feed_forward=experts(
                *(12, 4),
                routing="sigmoid",
                has_correction=True,
                num_groups=4,
                num_active_groups=2,
                shared=FeedForwardSpec(size=33),
            ),
        ),
    ),
    "gemma 4": model(
        structs.replace(
            LAYER,
            norms="both",
            has_scale=True,
            feed_forward=experts(
                *(9, 3), shared=FeedForwardSpec(size=100), has_norms=True, has_scales=True, router_multiplier=80**-0.5
            ),
        ),
    ),
    "gpt-oss": model(
        structs.replace(
            LAYER,
            feed_forward=experts(
                8, 4, FeedForwardSpec(size=65, activation="swiglu_oai", has_bias=True), has_router_bias=True
            ),
        ),
    ),
    "without gates, in parallel": model(
        structs.replace(
            LAYER,
            norms="parallel",
            feed_forward=experts(5, 2, FeedForwardSpec(size=40, activation="relu2", is_gated=False, has_bias=True)),
        ),
    ),
}
LENGTHS = [90, 1, 37, 130]


def joined(computed: list[Computed]) -> Computed:
    return Computed(*(torch.cat([each[kind] for each in computed]) for kind in (0, 1)))


def median_error(found: Tensor, expected: Tensor) -> float:
    """Of tokens: where numbers are rounded some pass other experts, and differ far more than the others."""
    return statistics.median(relative_error(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_schedules(name: str) -> None:
    """Mixed steps, with weights of 16 bits and of 8."""
    source = with_random_weights(MODELS[name])
    sequences = random_sequences(MODELS[name].vocab_size, LENGTHS)
    tables = scattered_tables(LENGTHS, 16, 40)
    steps = random_steps(LENGTHS, [0] * 4, seed=3)
    expected, rounded = (
        joined([TorchDecoder(source, dtype).run(sequence) for sequence in sequences]).logits_TV
        for dtype in ("float32", "bfloat16")
    )
    for build in BUILDS_HERE:
        for quantization, most in (("none", median_error(rounded, expected)), ("int8", 0.15)):
            decoder = CompiledDecoder(source, build, num_blocks=40, quantization=quantization)
            found = joined(decoder.run(sequences, tables, steps)).logits_TV
            assert 0.0003 < median_error(found, expected) <= most, (build, quantization)


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_neighbours_chunks_and_threads_do_not_change_bits(name: str, build: str, quantization: str) -> None:
    """With tiles only the same rows give the same bits; elsewhere any steps do."""
    _check_bits(build, MODELS[name].vocab_size, with_random_weights(MODELS[name]), quantization=quantization)


def _check_bits(build: str, vocab_size: int, source: Weighted, **options: Any) -> None:
    sequences = random_sequences(vocab_size, LENGTHS)
    tables = scattered_tables(LENGTHS, 16, 40)
    schedules = [random_steps(LENGTHS, [0] * 4, seed=seed) for seed in (1, 2)]

    def run(seed: int, num_threads: int) -> Computed:
        decoder = CompiledDecoder(source, build, num_blocks=40, num_threads=num_threads, **options)
        return joined(decoder.run(sequences, tables, schedules[seed]))

    one, other, threads = run(0, 1), run(1, 1), run(0, 3)
    assert torch.equal(one.hidden_TH, threads.hidden_TH)
    if build != TILED:
        assert torch.equal(one.hidden_TH, other.hidden_TH)


PACKED = model(
    structs.replace(
        LAYER,
        feed_forward=experts(7, 3, FeedForwardSpec(size=256), shared=FeedForwardSpec(size=288), has_shared_gate=True),
    ),
    structs.replace(LAYER, feed_forward=experts(4, 2, FeedForwardSpec(size=96))),
    hidden_size=256,
)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_codes(build: str) -> None:
    """Each matrix of a type of its own, those of one layer's experts in bfloat16."""
    kinds: dict[Any, str] = {"query": "Q4_0", "key": "Q4_0", "value": "Q4_0", "lm_head": "Q6_K"}
    kinds |= {("gate", 0): "Q4_K", ("up", 0): "Q5_K", ("down", 0): "Q8_0", ("down", 1): "MXFP4"}
    source, blocks = with_blocks(PACKED, kinds)
    types = {
        (key.name, key.layer, key.expert): kinds.get((key.name, key.layer), kinds.get(key.name, "")) for key in blocks
    }
    assert sum(expert >= 0 for _, _, expert in types) == 3 * 7 + 4
    _check_bits(build, PACKED.vocab_size, source, types=types, blocks=blocks)
    [sequence] = random_sequences(PACKED.vocab_size, [140])
    expected = TorchDecoder(source, "float32").run(sequence).logits_TV
    pieces = [[Piece(0, 0, 100)], [Piece(0, 100, 101)], [Piece(0, 101, 140)]]
    decoder = CompiledDecoder(source, build, types=types, blocks=blocks, num_threads=2)
    found = only(decoder.run([sequence], scattered_tables([140], 16, 64), pieces)).logits_TV
    assert 0.001 < median_error(found, expected) < 0.03
    counted = decoder.decoder.weight_bytes
    assert counted["router"] == 4 * (7 + 4) * 256
    of_experts = sum(values.numel() for key, values in blocks.items() if key.expert >= 0)
    assert counted["experts"] == of_experts + 4 * 2 * 2 * 96 * 256


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("kind", ["F8_128", "Q4_0"])
def test_experts_of_a_layer_may_differ(kind: str, build: str) -> None:
    """The first is of 16 bits. With so many rows, its products are cut into other pieces than the others'."""
    source, blocks = with_blocks(PACKED, dict.fromkeys(("gate", "up", "down"), kind))
    blocks = {key: values for key, values in blocks.items() if key.expert != 0}
    types = {(key.name, key.layer, key.expert): kind for key in blocks}
    _check_bits(build, PACKED.vocab_size, source, types=types, blocks=blocks)
    [ids] = random_sequences(PACKED.vocab_size, [400])
    expected = TorchDecoder(source, "float32").run(ids).logits_TV
    decoder = CompiledDecoder(source, build, types=types, blocks=blocks, num_blocks=40, num_threads=1)
    found = only(decoder.run([ids], [list(range(25))], [[Piece(0, 0, 400)]])).logits_TV
    assert median_error(found, expected) < 0.03


NUM_EXPERTS = 21
CHOICES = {
    "softmax": experts(NUM_EXPERTS, 4),
    "one": experts(NUM_EXPERTS, 1),
    "all": experts(NUM_EXPERTS, NUM_EXPERTS, has_correction=True),
    "not normalized": experts(NUM_EXPERTS, 5, is_normalized=False, scaling=2.5, has_router_bias=True),
    "corrected": experts(NUM_EXPERTS, 5, has_correction=True, min_sum=0.3),
    "sigmoid": experts(NUM_EXPERTS, 6, routing="sigmoid", has_correction=True, min_sum=1e-20, scaling=0.7),
    "groups": experts(
        *(NUM_EXPERTS, 5),
        routing="sigmoid",
        has_correction=True,
        num_groups=7,
        num_active_groups=3,
    ),
}


def revealing(spec: ExpertsSpec) -> Weighted:
    """A model whose residual stream behind its only layer has the share of each expert in its first elements.

    Attention gives nothing, and an expert a one in its place, whatever it gets.
    """
    expert = FeedForwardSpec(size=16, activation="relu2", is_gated=False, has_bias=True)
    layer = structs.replace(LAYER, feed_forward=structs.replace(spec, expert=expert))
    weighted = with_random_weights(model(layer))
    for key, values in weighted.weights.items():
        if key.name == "embedding":
            values[:, :NUM_EXPERTS] = 0
        elif key.name == "output" or key.expert >= 0:
            values.zero_()
            if key.kind == "bias":
                values[slice(None) if key.name == "up" else key.expert] = 1
    return weighted


def torch_s_shares(source: Weighted, spec: ExpertsSpec, ids: list[int]) -> Tensor:
    """[T, E]."""
    weights = {key[::2]: values.double() for key, values in source.weights.items() if key.expert < 0}
    x_TH = weights["embedding", "weight"][ids]
    normed_TH = x_TH * (x_TH.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["feed_forward_norm", "weight"]
    products_TE = normed_TH @ weights["router", "weight"].T + weights.get(("router", "bias"), 0)
    correction_E = weights.get(("correction", "weight"))
    chosen = route(spec, products_TE.float(), None if correction_E is None else correction_E.float())
    return torch.zeros(len(ids), spec.num_experts).scatter(1, chosen.experts_TA, chosen.shares_TA)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_and_shares_are_torch_s(name: str) -> None:
    spec = CHOICES[name]
    source = revealing(spec)
    ids = list(range(150))
    expected = torch_s_shares(source, spec, ids)
    assert len((expected != 0).unique(dim=0)) > 15 or spec.num_active == NUM_EXPERTS
    for build in BUILDS_HERE:
        decoder = CompiledDecoder(source, build, num_threads=2)
        found = decoder.step([ids], [list(range(10))], [Piece(0, 0, 150)])[:, :NUM_EXPERTS]
        assert torch.equal(found != 0, expected != 0), build
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_of_equal_experts_the_first_are_chosen(build: str) -> None:
    source = revealing(CHOICES["softmax"])
    source.weights[WeightKey("router", 0, "weight")][...] = 0
    source.weights[WeightKey("router", 0, "weight")][[3, 17]] = 1e-3
    source.weights[WeightKey("embedding", 0, "weight")].abs_()
    found = CompiledDecoder(source, build).step([[5, 6]], [[0]], [Piece(0, 0, 2)])[:, :NUM_EXPERTS]
    assert [row.nonzero().flatten().tolist() for row in found] == [[0, 1, 3, 17]] * 2


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_what_is_no_number_stays_so_in_its_row_alone(build: str, name: str) -> None:
    source = revealing(CHOICES[name])
    decoder = CompiledDecoder(source, build)
    sequences, pieces = [[number] for number in range(20)], [Piece(number, 0, 1) for number in range(20)]
    tables = [[number] for number in range(20)]
    before = decoder.step(sequences, tables, pieces)
    source.weights[WeightKey("embedding", 0, "weight")][7, 70] = torch.nan
    after = CompiledDecoder(source, build).step(sequences, tables, pieces)
    others = [number for number in range(20) if number != 7]
    assert torch.equal(after[others], before[others])
    assert after[7].isnan().any()
