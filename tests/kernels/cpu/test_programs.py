"""What models other than Llama and Qwen3 have, in each build, against torch in float32 with the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from msgspec import structs

from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.decoder import DrawRows
from eventlm.models.cpu_kernels import choose_forward
from eventlm.models.program import WEIGHTS, WeightKey
from eventlm.models.spec import (
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Computed,
    Piece,
    TorchDecoder,
    only,
    random_sequences,
    random_steps,
    relative_error,
    scattered_tables,
    with_random_weights,
)

BUILDS_HERE = native.available_builds()
TILED = "amx"
ROPE = RopeSpec(rotary_dim=32)
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, rope=ROPE, scale=32**-0.5)
FEED_FORWARD = FeedForwardSpec(size=160)
LAYER = LayerSpec(attention=ATTENTION, feed_forward=FEED_FORWARD)


def attention(**changes: Any) -> AttentionSpec:
    return structs.replace(ATTENTION, **changes)


def layers(
    *attentions: AttentionSpec, feed_forward: FeedForwardSpec = FEED_FORWARD, **changes: Any
) -> tuple[LayerSpec, ...]:
    """One for each attention."""
    return tuple(
        structs.replace(LAYER, attention=attention, feed_forward=feed_forward, **changes) for attention in attentions
    )


def model(*all_layers: LayerSpec, norm: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return ModelSpec(
        **{
            "architecture": "",
            "vocab_size": 173,
            "hidden_size": 80,
            "layers": all_layers,
            "norm": NormSpec(**{"eps": 1e-5, **(norm or {})}),
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **changes,
        }
    )


#: Of Gemma 4's layers without a window.
WIDE: dict[str, Any] = {
    "head_dim": 64,
    "num_kv_heads": 1,
    "rope": RopeSpec(type="proportional", rotary_dim=64, num_pairs=20),
    "qk_norm": "head",
    "scale": 0.2,
}
MODELS = {
    "gemma 2": model(
        *layers(
            attention(window=20, soft_cap=3.0, scale=0.3),
            attention(soft_cap=3.0, scale=0.3),
            feed_forward=FeedForwardSpec(size=100, activation="gelu_tanh"),
            norms="both",
        ),
        norm={"offset": 1.0},
        tie_word_embeddings=True,
        embedding_multiplier=80**0.5,
        logits_soft_cap=2.0,
    ),
    "gemma 3": model(
        *layers(
            attention(window=17, qk_norm="head", rope=RopeSpec(rotary_dim=32, theta=1000.0)),
            attention(qk_norm="head"),
            norms="both",
        ),
        norm={"offset": 1.0},
    ),
    "gpt-oss without experts": model(
        *layers(
            attention(window=33, has_sinks=True, has_qkv_bias=True, has_output_bias=True),
            attention(has_sinks=True, has_qkv_bias=True, has_output_bias=True),
        )
    ),
    "olmo 2": model(*layers(attention(qk_norm="whole"), attention(qk_norm="whole"), norms="after")),
    "olmo 3": model(
        *layers(attention(qk_norm="whole", window=40, rope=None), attention(qk_norm="whole"), norms="after")
    ),
    "cohere 2": model(
        *layers(
            attention(window=25, rope=RopeSpec(rotary_dim=32, is_interleaved=True)),
            attention(rope=None),
            norms="parallel",
        ),
        norm={"kind": "layer"},
        tie_word_embeddings=True,
        logits_multiplier=0.25,
    ),
    "phi 2": model(
        *layers(
            *[attention(rope=RopeSpec(rotary_dim=12), has_qkv_bias=True, has_output_bias=True)] * 2,
            feed_forward=FeedForwardSpec(size=101, activation="gelu", is_gated=False, has_bias=True),
            norms="parallel",
        ),
        norm={"kind": "layer", "has_bias": True},
        has_head_bias=True,
    ),
    "nemotron": model(
        *layers(
            *[attention(rope=RopeSpec(rotary_dim=16))] * 2,
            feed_forward=FeedForwardSpec(size=90, activation="relu2", is_gated=False),
        ),
        norm={"kind": "layer", "has_bias": True, "offset": 1.0},
    ),
    "granite, partly rotated, with norms of heads": model(
        *layers(
            attention(scale=0.05, qk_norm="head", rope=RopeSpec(rotary_dim=16)),
            attention(scale=0.05, qk_norm="head", rope=RopeSpec(rotary_dim=24, is_interleaved=True)),
            residual_multiplier=0.3,
        ),
        embedding_multiplier=6.0,
        logits_multiplier=0.125,
    ),
    "glm 4": model(
        *layers(
            *[attention(rope=RopeSpec(rotary_dim=20, is_interleaved=True), has_qkv_bias=True)] * 2,
            norms="both",
            residual_multiplier=0.5,
        )
    ),
    "ministral 3": model(
        *layers(
            *[
                attention(
                    head_dim=64,
                    scale=0.125,
                    rope=RopeSpec(rotary_dim=64, original_max_position_embeddings=8),
                    query_scaling_beta=0.3,
                )
            ]
            * 2
        )
    ),
    "neurons that differ by layer": model(
        *layers(ATTENTION, feed_forward=FeedForwardSpec(size=160)),
        *layers(ATTENTION, feed_forward=FeedForwardSpec(size=65)),
        *layers(ATTENTION, feed_forward=FeedForwardSpec(size=33, activation="silu", is_gated=False)),
        *layers(ATTENTION, feed_forward=FeedForwardSpec(size=81, activation="gelu")),
    ),
    "layer norms of heads": model(
        *layers(attention(qk_norm="head"), attention(qk_norm="whole")), norm={"kind": "layer", "has_weight": False}
    ),
    "heads that differ by layer": model(
        *layers(
            attention(
                num_heads=6, num_kv_heads=3, head_dim=16, rope=RopeSpec(rotary_dim=16), window=20, has_sinks=True
            ),
            attention(num_heads=4, num_kv_heads=1, head_dim=512, scale=0.06, qk_norm="whole", has_qkv_bias=True),
            attention(num_heads=2, num_kv_heads=2, head_dim=48, rope=None, qk_norm="head"),
        )
    ),
    "gemma 4": model(
        *layers(
            attention(window=20, qk_norm="head", has_value_norm=True, scale=0.3),
            attention(**WIDE, values_are_keys=True, has_value_norm=True),
            attention(window=20, qk_norm="head", scale=0.3, keys_of=0),
            attention(**WIDE, keys_of=1),
            feed_forward=FeedForwardSpec(size=100, activation="gelu_tanh"),
            norms="both",
            has_scale=True,
        ),
        layer_inputs=LayerInputsSpec(size=64, vocab_size=180, activation="gelu_tanh"),
    ),
    "values that are keys, before the norm of all heads, and gates": model(
        *layers(
            attention(values_are_keys=True, qk_norm="whole", has_output_gate=True),
            attention(keys_of=0, has_output_gate=True),
        )
    ),
    "many heads for a key": model(
        *layers(
            attention(num_heads=24, num_kv_heads=2, head_dim=48, rope=ROPE, scale=48**-0.5, window=19, has_sinks=True),
            attention(num_heads=24, num_kv_heads=2, head_dim=48, rope=ROPE, scale=48**-0.5, soft_cap=2.0),
        )
    ),
}


#: How far logits may be from those of float32 with 8-bit weights, or with 8-bit keys and values.
ROUGHER: list[tuple[dict[str, Any], float]] = [
    ({"quantization": "int8"}, 0.1),
    ({"kv_dtype": "int8"}, 0.05),
    ({"kv_dtype": "fp8"}, 0.15),
]


def test_names_are_those_of_the_program() -> None:
    assert WEIGHTS == native.WEIGHTS
    assert get_args(Activation) == native.ACTIVATIONS


@pytest.mark.parametrize("name", MODELS)
def test_schedules(name: str) -> None:
    """Mixed steps over scattered blocks, with keys, values and weights of 16 bits and of 8."""
    source = with_random_weights(MODELS[name])
    lengths = [117, 1, 17, 90, 64, 33]
    sequences = random_sequences(MODELS[name].vocab_size, lengths)
    tables = scattered_tables(lengths, 16, 40)
    steps = random_steps(lengths, [0] * 6, seed=3)
    expected, rounded = (
        _joined([TorchDecoder(source, dtype).run(sequence) for sequence in sequences])
        for dtype in ("float32", "bfloat16")
    )
    for build in BUILDS_HERE:
        found = _joined(CompiledDecoder(source, build, num_blocks=40).run(sequences, tables, steps))
        for kind in (0, 1):
            error = relative_error(found[kind], expected[kind])
            assert error <= relative_error(rounded[kind], expected[kind]), (build, kind)
            assert error < 0.02, (build, kind)
        for options, most in ROUGHER:
            found = _joined(CompiledDecoder(source, build, num_blocks=40, **options).run(sequences, tables, steps))
            assert 0.001 < relative_error(found.logits_TV, expected.logits_TV) < most, (build, options)


def _joined(computed: Sequence[Computed]) -> Computed:
    return Computed(*(torch.cat([each[kind] for each in computed]) for kind in (0, 1)))


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("name", MODELS)
def test_neighbours_chunks_and_threads_do_not_change_bits(name: str, build: str) -> None:
    """With tiles only the same rows give the same bits; elsewhere any steps do."""
    source = with_random_weights(MODELS[name])
    lengths = [100, 71, 40, 1, 16]
    sequences = random_sequences(MODELS[name].vocab_size, lengths)
    tables = scattered_tables(lengths, 32, 20)
    schedules = [random_steps(lengths, [0] * 5, seed=seed) for seed in (1, 2)]

    def run(seed: int, num_threads: int) -> Computed:
        decoder = CompiledDecoder(source, build, block_size=32, num_blocks=20, num_threads=num_threads)
        return _joined(decoder.run(sequences, tables, schedules[seed]))

    one, other, threads = run(0, 1), run(1, 1), run(0, 3)
    assert torch.equal(one.hidden_TH, threads.hidden_TH)
    assert torch.equal(one.logits_TV, threads.logits_TV)
    if build != TILED:
        assert torch.equal(one.hidden_TH, other.hidden_TH)
        assert torch.equal(one.logits_TV, other.logits_TV)


#: Windows below, at and above what one pass of a decode goes over, and one that takes a little of a second pass.
LONG = {
    window: model(
        *layers(
            attention(window=window, has_sinks=True, num_heads=6),
            attention(window=window, soft_cap=3.0, num_heads=6),
        )
    )
    for window in (1, 70, 1024, 1030, 0)
}
LONG_TOKENS = 1400


@pytest.mark.parametrize("window", [70, 1024, 1030, 0])
def test_long_contexts(window: int) -> None:
    """Prompts, chunks and decodes, the last ones alone and together, on one thread and on three."""
    source = with_random_weights(LONG[window])
    [sequence] = random_sequences(LONG[window].vocab_size, [LONG_TOKENS])
    # Sinks that weigh about as much as a thousand tokens.
    source.weights[WeightKey("sinks", 0, "weight")].add_(7)
    expected, rounded = (TorchDecoder(source, dtype).run(sequence).logits_TV for dtype in ("float32", "bfloat16"))
    error = relative_error(rounded, expected)
    tables = scattered_tables([LONG_TOKENS], 32, 44)
    around = [*range(60, 80), *range(1020, 1045), *range(1380, LONG_TOKENS)]
    schedules = {
        "whole": [[Piece(0, 0, LONG_TOKENS)]],
        "chunks": [[Piece(0, start, min(start + 333, LONG_TOKENS))] for start in range(0, LONG_TOKENS, 333)],
        "decodes": [[Piece(0, index, index + 1) for index in around]],
        "alone": [[Piece(0, index, index + 1)] for index in around],
    }
    for build in BUILDS_HERE:
        decoder, one_thread = (
            CompiledDecoder(source, build, block_size=32, num_blocks=44, num_threads=num_threads)
            for num_threads in (3, 1)
        )
        found = {}
        for name, steps in schedules.items():
            found[name] = only(decoder.run([sequence], tables, steps))
            wanted = expected[around] if name in ("decodes", "alone") else expected
            assert relative_error(found[name].logits_TV, wanted) <= error, (build, name)
            if name != "alone":
                again = only(one_thread.run([sequence], tables, steps))
                assert torch.equal(again.hidden_TH, found[name].hidden_TH), (build, name)
        if build == TILED:
            continue
        hidden = {name: computed.hidden_TH for name, computed in found.items()}
        assert torch.equal(hidden["whole"], hidden["chunks"]), build
        assert torch.equal(hidden["decodes"], hidden["alone"]), build
        # Decodes of one pass.
        are_short = [place for place, index in enumerate(around) if min(window or index + 1, index + 1) <= 1024]
        indices = [around[place] for place in are_short]
        assert torch.equal(hidden["decodes"][are_short], hidden["whole"][indices]), build


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("window", [1, 70, 1030])
def test_blocks_before_the_window_are_not_read(build: str, kv_dtype: str, window: int) -> None:
    """They are NaN, or of no block at all."""
    source = with_random_weights(LONG[window])
    length = 1300
    [sequence] = random_sequences(LONG[window].vocab_size, [length])
    decoder = CompiledDecoder(source, build, kv_dtype=kv_dtype, num_blocks=83, num_threads=2)
    table = list(range(1, 83))
    decoder.step([sequence], [table], [Piece(0, 0, 1200)])
    pieces = [Piece(0, 1200, 1240)], [Piece(0, 1240, 1241)]
    before = [decoder.step([sequence], [table], step) for step in pieces]
    # Of the first query's window.
    first = (1200 + 1 - window) // 16
    cut = [0] * first + table[first:]
    after = [decoder.step([sequence], [cut], step) for step in pieces]
    for own, others in zip(before, after, strict=True):
        assert own.isfinite().all()
        assert torch.equal(own, others)


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_a_token_that_is_no_number_leaves_the_window(build: str, kv_dtype: str) -> None:
    """With bfloat16 it spoils those after it until its sub-block of 16 tokens is not read any more."""
    source = with_random_weights(model(*layers(attention(window=17, has_sinks=True))))
    source.weights[WeightKey("embedding", 0, "weight")][172] = torch.nan
    sequence = [number * 7 % 172 for number in range(60)]
    spoilt = [*sequence[:20], 172, *sequence[21:]]
    steps = [[Piece(0, index, index + 1)] for index in range(60)]
    decoder = CompiledDecoder(source, build, kv_dtype=kv_dtype)
    wanted, found = (only(decoder.run([tokens], [[3, 0, 7, 5]], steps)).logits_TV for tokens in (sequence, spoilt))
    assert torch.equal(found[:20], wanted[:20])
    assert found[20:37].isnan().all()
    end = 48 if kv_dtype == "bfloat16" else 37
    assert torch.equal(found[end:], wanted[end:])


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_neurons_of_another_layer_are_not_read(build: str, quantization: str) -> None:
    """What a larger layer left in a step before this one may be no number."""
    small, large = FeedForwardSpec(size=65), FeedForwardSpec(size=160)
    source = with_random_weights(model(*layers(ATTENTION, feed_forward=small), *layers(ATTENTION, feed_forward=large)))
    source.weights[WeightKey("embedding", 0, "weight")][172] = torch.nan
    decoder = CompiledDecoder(source, build, quantization=quantization)
    sequences = [list(range(30)), [172] * 30]
    before = decoder.step(sequences, [[0, 1], [2, 3]], [Piece(0, 0, 30)])
    assert decoder.step(sequences, [[0, 1], [2, 3]], [Piece(1, 0, 30)]).isnan().all()
    assert torch.equal(decoder.step(sequences, [[0, 1], [2, 3]], [Piece(0, 0, 30)]), before)


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_draw_without_logits_is_that_of_the_logits(build: str, quantization: str) -> None:
    """With all that can become of a product before it is a logit."""
    changes = {"has_head_bias": True, "logits_multiplier": 0.7, "logits_soft_cap": 3.0, "vocab_size": 5003}
    for name in changes:
        source = with_random_weights(model(LAYER, **{"vocab_size": 5003, name: changes[name]}))
        decoder = CompiledDecoder(source, build, quantization=quantization, num_threads=2).decoder
        _check_draws(decoder)
    _check_draws(
        CompiledDecoder(with_random_weights(model(LAYER, **changes)), build, quantization=quantization).decoder
    )


def _check_draws(decoder: Any) -> None:
    rng = random.Random(0)
    hidden = torch.randn(20, 80, generator=torch.Generator().manual_seed(1))
    hidden[3, 7] = torch.nan
    temperatures = [0.0 if row % 3 == 1 else row * 0.1 for row in range(20)]
    rows = DrawRows(temperatures, [rng.getrandbits(64) for _ in range(20)], range(20))
    drawn = decoder.draw_next(hidden, rows)
    assert drawn == decoder.draw(decoder.logits(hidden), rows)
    assert drawn[3] == -1
    assert len(set(drawn)) > 15


def test_odd_shapes_are_not_supported() -> None:
    def reason(changed: ModelSpec) -> str:
        return choose_forward("auto", changed, model="model", dtype="bfloat16", block_size=16).reason

    assert {reason(each) for each in MODELS.values()} == {""}
    assert reason(model(*layers(attention(head_dim=40)))) == "heads of 40 are not a multiple of 16 up to 512"
