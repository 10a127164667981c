"""Decoders of parts compute together what one of the whole does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from eventlm.core.shards import Layout, Place
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.kernels.sequence_states import StateRow, StepStates
from eventlm.models.config import read_model
from eventlm.models.decoder import Decoder
from eventlm.models.loader import default_dtype, load_decoder
from eventlm.models.program import WeightKey
from eventlm.models.rope import rope_tables
from eventlm.models.spec import ExpertsSpec, FeedForwardSpec, ModelSpec
from eventlm.models.weights.slices import Ranges
from eventlm.worker.ranks.partial_decoder import PartialDecoder
from eventlm.worker.ranks.shard import Shard, shard_of
from tests.kernels.cpu.decoders import Shape, write_checkpoint
from tests.models.families.proof import whole_attention
from tests.models.test_decoder import MODELS, decoder_of, random_weights
from tests.worker.ranks.test_shard import ATTENTION, CONVOLUTION, DELTA, layer_of, model_of
from tests.worker.ranks.threads import ThreadGroup, on_all

TOKENS = torch.randint(0, 61, (17,), generator=torch.Generator().manual_seed(1))
TOLERANCE = 1e-4
Weights = dict[WeightKey, Tensor]
#: What a replica's decoders have by stage and tensor rank.
Stages = list[list[Decoder]]

CONVOLVING = layer_of(attention=None, recurrent=CONVOLUTION)
RECALLING = layer_of(attention=None, recurrent=DELTA)
EXPERTS = ExpertsSpec(
    num_experts=5,
    num_active=2,
    expert=FeedForwardSpec(size=40),
    shared=FeedForwardSpec(size=72),
    has_shared_gate=True,
)
GATED = layer_of(attention=structs.replace(ATTENTION, has_output_gate=True, qk_norm="head"), feed_forward=EXPERTS)
SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 61}
OWN_MODELS = {
    "3 heads of keys": model_of(*[layer_of()] * 2, **SIZES),
    "3 heads of keys, tied": model_of(*[layer_of()] * 3, **SIZES, tie_word_embeddings=True),
    "9 heads of queries": model_of(*[layer_of(attention=structs.replace(ATTENTION, num_heads=9))] * 2, **SIZES),
    "convolutions": model_of(CONVOLVING, layer_of(), CONVOLVING, **SIZES, tie_word_embeddings=True),
    "delta rule": model_of(RECALLING, GATED, RECALLING, **SIZES),
    "delta rule, in turns": model_of(
        layer_of(attention=None, recurrent=structs.replace(DELTA, is_interleaved=True)), GATED, **SIZES
    ),
    "sinks": model_of(*[layer_of(attention=structs.replace(ATTENTION, has_sinks=True))] * 2, **SIZES),
}
SPLITTABLE = OWN_MODELS | {
    name: model
    for name, model in MODELS.items()
    if all(attention.qk_norm != "whole" for attention in model.attentions.values())
}


def taken(values: Tensor, rows: Ranges, columns: Ranges) -> Tensor:
    for dim, ranges in enumerate((rows, columns)):
        if ranges:
            values = torch.cat([values.narrow(dim, each.start, len(each)) for each in ranges], dim=dim)
    return values


def parts_of(
    model: ModelSpec, weights: Weights, layout: Layout, dtype: torch.dtype = torch.float32, *, is_int8: bool = False
) -> Stages:
    def part_of(shard: Shard, rank: int, group: ThreadGroup) -> Decoder:
        with default_dtype(dtype):
            is_alone = layout.tensor == 1
            decoder = Decoder(shard.model) if is_alone else PartialDecoder(shard, rank, group.gather_of(rank))
        if is_int8:
            decoder.to_int8()
        for key, (whole, rows, columns) in shard.slices.items():
            target, scales = decoder.target(key)
            values = taken(weights[whole], rows, columns)
            if scales is None:
                target.copy_(values)
            else:
                target[:], scales[:] = quantize_rows(values)
        return decoder

    return stages_of(model, layout, part_of)


def stages_of(model: ModelSpec, layout: Layout, make: Callable[[Shard, int, ThreadGroup], Decoder]) -> Stages:
    stages = []
    for stage in range(layout.stages):
        group = ThreadGroup(layout.tensor)
        shards = [shard_of(model, layout, Place(stage, 0, rank)) for rank in range(layout.tensor)]
        stages.append([make(shard, rank, group) for rank, shard in enumerate(shards)])
    return stages


def forward(decoder: Decoder, residual_TH: Tensor | None = None) -> Tensor:
    model, num_tokens = decoder.model, len(TOKENS)
    dtype = next(weight.dtype for weight in decoder.weights.values() if weight.is_floating_point())
    ropes = rope_tables(model, 64, dtype=dtype, device=torch.device("cpu"))
    states = StepStates(torch.full((1, model.state_size), torch.nan), [StateRow(num_tokens, slot=0, source=-1)])
    return decoder.forward(
        TOKENS,
        torch.arange(num_tokens),
        ropes,
        whole_attention(decoder),
        states=states if model.state_size else StepStates(torch.empty(0, 0), ()),
        residual_TH=residual_TH,
    )


def logits_of(stages: Stages) -> Tensor:
    """All ranks of a stage have the same bits."""
    residual = None
    for stage in stages:
        first, *others = on_all([partial(forward, decoder, residual) for decoder in stage])
        assert all(torch.equal(first, other) for other in others)
        residual = first
    assert residual is not None
    first, *others = on_all([partial(decoder.logits, residual) for decoder in stages[-1]])
    assert all(torch.equal(first, other) for other in others)
    return first


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("layout", [Layout(2), Layout(3), Layout(2, 2)])
@pytest.mark.parametrize("name", SPLITTABLE)
def test_parts_compute_what_the_whole_does(name: str, layout: Layout) -> None:
    model = SPLITTABLE[name]
    if layout.stages > 1 and model.layer_inputs is not None:
        pytest.skip("has no stages")
    weights = random_weights(model)
    expected = decoder_of(model, weights)
    logits = logits_of(parts_of(model, weights, layout))
    assert difference(logits, expected.logits(forward(expected))) < TOLERANCE


def test_inputs_of_layers_are_on_all_ranks() -> None:
    """Gemma 4 without its layers that have one norm over all heads."""
    whole = MODELS["gemma 4"]
    model = structs.replace(whole, layers=whole.layers[:3])
    weights = random_weights(model)
    expected = decoder_of(model, weights)
    logits = logits_of(parts_of(model, weights, Layout(2)))
    assert difference(logits, expected.logits(forward(expected))) < TOLERANCE


def test_stages_go_on_with_the_residual_stream() -> None:
    model = OWN_MODELS["3 heads of keys, tied"]
    weights = random_weights(model)
    expected = decoder_of(model, weights)
    stages = parts_of(model, weights, Layout(1, 3))
    assert [
        sorted(key.name for key in decoder.weights if key.name in ("embedding", "lm_head")) for [decoder] in stages
    ] == [
        ["embedding"],
        [],
        ["lm_head"],
    ]
    assert difference(logits_of(stages), expected.logits(forward(expected))) < TOLERANCE


@pytest.mark.parametrize("name", ["3 heads of keys", "delta rule"])
def test_bfloat16_is_no_farther_from_float32(name: str) -> None:
    model = OWN_MODELS[name]
    weights = {key: values.bfloat16().float() for key, values in random_weights(model).items()}
    exact = decoder_of(model, weights)
    expected = exact.logits(forward(exact))
    rounded = decoder_of(model, weights, torch.bfloat16)
    of_one = (rounded.logits(forward(rounded)) - expected).square().mean().sqrt()
    of_parts = (logits_of(parts_of(model, weights, Layout(2), torch.bfloat16)) - expected).square().mean().sqrt()
    assert of_parts < 1.1 * of_one


def test_int8_is_near() -> None:
    model = OWN_MODELS["3 heads of keys, tied"]
    weights = random_weights(model)
    exact, rounded = decoder_of(model, weights), decoder_of(model, weights, is_int8=True)
    expected = exact.logits(forward(exact))
    logits = logits_of(parts_of(model, weights, Layout(2), is_int8=True))
    assert difference(logits, expected) < 1.5 * difference(rounded.logits(forward(rounded)), expected)


def test_stages_in_int8_have_the_bits_of_the_whole() -> None:
    model = OWN_MODELS["3 heads of keys, tied"]
    weights = random_weights(model)
    expected = decoder_of(model, weights, is_int8=True)
    stages = parts_of(model, weights, Layout(1, 2), is_int8=True)
    assert torch.equal(logits_of(stages), expected.logits(forward(expected)))


def test_parts_of_a_checkpoint_are_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Shape(num_heads=6, num_kv_heads=3, attention_bias=True, mlp_bias=True))
    model = read_model(folder)
    expected = load_decoder(folder, dtype="float32")

    def make(shard: Shard, rank: int, group: ThreadGroup) -> Decoder:
        gather = group.gather_of(rank)
        return load_decoder(
            folder, dtype="float32", part=shard.part, make=lambda _: PartialDecoder(shard, rank, gather)
        )

    for layout in (Layout(2), Layout(4), Layout(2, 2)):
        logits = logits_of(stages_of(model, layout, make))
        assert difference(logits, expected.logits(forward(expected))) < TOLERANCE
