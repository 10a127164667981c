"""What ranks have of a model is the whole, once; a decoder in parts computes what one does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from eventlm.core.shards import Layout, Place
from eventlm.errors import UsageError
from eventlm.models.program import WeightKey
from eventlm.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from eventlm.models.transformers_model import TransformersModel
from eventlm.models.weights.decoder_weights import EMBEDDING, HEAD, model_weights
from eventlm.models.weights.matrix_types import MatrixFormat, MatrixFormats
from eventlm.models.weights.slices import Slice, count_of
from eventlm.worker.ranks.shard import Shard, check_layout, shard_of, stage_layers

HIDDEN, VOCAB = 8, 101
ROPE = RopeSpec(rotary_dim=8)
ATTENTION = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=8, rope=ROPE, scale=8**-0.5)
DENSE = FeedForwardSpec(size=96)
CONVOLUTION = ConvolutionSpec(num_channels=64, num_taps=3, has_bias=True)
DELTA = DeltaSpec(num_key_heads=3, num_value_heads=6, key_dim=8, value_dim=16, num_taps=4)


def model_of(*layers: LayerSpec, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "architecture": "",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "layers": layers,
        "norm": NormSpec(eps=1e-5),
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return ModelSpec(**fields | changes)


def layer_of(**changes: Any) -> LayerSpec:
    return LayerSpec(**{"attention": ATTENTION, "feed_forward": DENSE} | changes)


def attentions() -> st.SearchStrategy[AttentionSpec]:
    return st.builds(
        lambda num_keys, group, **fields: structs.replace(
            ATTENTION, num_heads=num_keys * group, num_kv_heads=num_keys, **fields
        ),
        st.integers(1, 5),
        st.integers(1, 4),
        has_qkv_bias=st.booleans(),
        has_output_bias=st.booleans(),
        has_sinks=st.booleans(),
        has_output_gate=st.booleans(),
        values_are_keys=st.booleans(),
        qk_norm=st.sampled_from(["none", "head"]),
    )


def deltas() -> st.SearchStrategy[DeltaSpec]:
    return st.builds(
        lambda num_keys, group, is_interleaved: structs.replace(
            DELTA, num_key_heads=num_keys, num_value_heads=num_keys * group, is_interleaved=is_interleaved
        ),
        st.integers(1, 4),
        st.integers(1, 3),
        st.booleans(),
    )


NEURONS = st.builds(FeedForwardSpec, size=st.integers(8, 200), is_gated=st.booleans(), has_bias=st.booleans())
PARTS = NEURONS | st.builds(
    ExpertsSpec, num_experts=st.just(3), num_active=st.just(2), expert=NEURONS, shared=st.none() | NEURONS
)
LAYERS = st.builds(LayerSpec, attention=attentions(), feed_forward=PARTS) | st.builds(
    LayerSpec, recurrent=st.just(CONVOLUTION) | deltas(), feed_forward=PARTS
)
MODELS = st.builds(
    lambda layers, is_tied: model_of(*layers, tie_word_embeddings=is_tied),
    st.lists(LAYERS, min_size=1, max_size=4),
    st.booleans(),
)
FORMATS = st.builds(
    lambda block: MatrixFormats(MatrixFormat(block, block)) if block > 1 else MatrixFormats(),
    st.sampled_from([1, 32, 128]),
)


def shards_of(model: ModelSpec, layout: Layout, formats: MatrixFormats | None = None) -> list[Shard]:
    return [shard_of(model, layout, layout.place_of(rank), formats) for rank in range(layout.num_ranks)]


def elements(cut: Slice, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of rows and columns."""
    rows, columns = ((*itertools.chain(*ranges),) for ranges in (cut.rows, cut.columns))
    return rows or (*range(shape[0]),), columns or (*range(shape[1] if len(shape) > 1 else 1),)


def is_on_all(key: WeightKey, model: ModelSpec) -> bool:
    is_summed = key.kind == "bias" and key.name in ("output", "down")
    return is_summed or key.name.endswith("_norm") or key.name in ("router", "delta_scale")


@given(MODELS, st.integers(1, 4), st.integers(1, 3), FORMATS)
def test_shards_are_the_whole_once(model: ModelSpec, tensor: int, stages: int, formats: MatrixFormats) -> None:
    layout = Layout(tensor, stages)
    try:
        check_layout(model, layout)
    except UsageError:
        return
    shapes = model_weights(model)
    #: How often each element is there.
    counts = {key: np.zeros((shape[0], shape[1] if len(shape) > 1 else 1), dtype=int) for key, shape in shapes.items()}
    for shard in shards_of(model, layout, formats):
        smaller = model_weights(shard.model)
        assert shard.slices.keys() == smaller.keys()
        assert shard.model.num_layers == len(shard.layers) > 0
        for key, cut in shard.slices.items():
            rows, columns = elements(cut, shapes[cut.key])
            assert (len(rows), len(columns)) == (smaller[key] if len(smaller[key]) > 1 else (smaller[key][0], 1))
            assert list(rows) == sorted(set(rows))
            counts[cut.key][np.ix_(rows, columns)] += 1
    for key, count in counts.items():
        if is_on_all(key, model):
            assert (count == tensor).all(), key
        elif key == EMBEDDING and model.tie_word_embeddings:
            assert (count == min(stages, 2)).all()
        else:
            assert (count >= 1).all() if _may_repeat(key, model, tensor) else (count == 1).all(), key


def _may_repeat(key: WeightKey, model: ModelSpec, tensor: int) -> bool:
    """Heads of keys where there are more ranks."""
    layer = model.layers[key.layer]
    if layer.attention is not None:
        return key.name in ("key", "value") and tensor > layer.attention.num_kv_heads
    delta = layer.recurrent
    return isinstance(delta, DeltaSpec) and key.name in ("mixed", "taps") and tensor > delta.num_key_heads


def test_heads_are_dealt_out_with_their_keys() -> None:
    model = model_of(layer_of(attention=structs.replace(ATTENTION, num_heads=9)))
    first, second = shards_of(model, Layout(2))
    query, key, output = (WeightKey(name, 0, "weight") for name in ("query", "key", "output"))
    assert [shard.model.attention.num_heads for shard in (first, second)] == [6, 3]
    assert [shard.model.attention.num_kv_heads for shard in (first, second)] == [2, 1]
    assert first.slices[query] == Slice(query, (range(48),))
    assert second.slices[key] == Slice(key, (range(16, 24),))
    assert second.slices[output] == Slice(output, (), (range(48, 72),))
    assert first.vocab_starts == (0, 64, VOCAB)


def test_ranks_beyond_the_heads_of_keys_share_them() -> None:
    model = model_of(layer_of(attention=structs.replace(ATTENTION, num_heads=8, num_kv_heads=2)))
    shards = shards_of(model, Layout(3))
    assert [shard.model.attention.num_heads for shard in shards] == [2, 2, 4]
    assert [shard.slices[WeightKey("key", 0, "weight")].rows for shard in shards] == [
        (range(8),),
        (range(8),),
        (range(8, 16),),
    ]


def test_neurons_even_out_what_heads_do_not() -> None:
    """3 heads of keys on 2 ranks."""
    attention = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, rope=ROPE, scale=1.0)
    layer = layer_of(attention=attention, feed_forward=FeedForwardSpec(size=1536))
    model = model_of(*[layer] * 4, hidden_size=576, vocab_size=49152, tie_word_embeddings=True)
    sizes = [sum(map(_size, model_weights(shard.model).values())) for shard in shards_of(model, Layout(2))]
    assert max(sizes) / sum(sizes) < 0.505
    columns = [shard.model.layers[0].dense for shard in shards_of(model, Layout(2))]
    assert [part.size % 32 for part in columns if part is not None] == [0, 0]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def test_blocks_are_not_cut() -> None:
    """Two heads of keys with their queries make a block of the output matrix, and neurons come in blocks."""
    attention = structs.replace(ATTENTION, num_heads=8, num_kv_heads=8, head_dim=16)
    model = model_of(layer_of(attention=attention, feed_forward=FeedForwardSpec(size=512)))
    key = WeightKey("output", 0, "weight")
    formats = MatrixFormats(others={key: MatrixFormat(32, 18), WeightKey("down", 0, "weight"): MatrixFormat(128, 70)})
    shards = shards_of(model, Layout(3), formats)
    assert [count_of(shard.slices[key].columns) % 32 for shard in shards] == [0, 0, 0]
    assert [shard.model.layers[0].dense.size % 128 for shard in shards if shard.model.layers[0].dense] == [0, 0, 0]


def test_layers_are_dealt_out_by_their_bytes() -> None:
    large, small = layer_of(feed_forward=FeedForwardSpec(size=4000)), layer_of()
    assert stage_layers(model_of(small, small, small, large), 2) == [range(3), range(3, 4)]
    # With the vocabulary on both ends.
    even = model_of(*[small] * 6, vocab_size=2000)
    assert stage_layers(even, 3) == [range(1), range(1, 5), range(5, 6)]
    assert stage_layers(even, 1) == [range(6)]


def test_only_the_ends_have_the_vocabulary() -> None:
    model = model_of(*[layer_of()] * 3, tie_word_embeddings=True, has_head_bias=True)
    first, middle, last = shards_of(model, Layout(1, 3))
    ends = ("embedding", "lm_head", "final_norm")
    names = [{key.name for key in shard.slices if key.name in ends} for shard in (first, middle, last)]
    assert names == [{"embedding"}, set(), {"final_norm", "lm_head"}]
    assert last.slices[HEAD].key == EMBEDDING
    assert last.slices[HEAD._replace(kind="bias")].key == HEAD._replace(kind="bias")
    assert middle.slices[WeightKey("query", 0, "weight")].key.layer == 1


WHOLE_NORMS = layer_of(attention=structs.replace(ATTENTION, qk_norm="whole"))
SHARED_KEYS = layer_of(attention=structs.replace(ATTENTION, keys_of=0))


@pytest.mark.parametrize(
    ("model", "layout", "what"),
    [
        (model_of(layer_of()), Layout(7), "6 query heads .* 7 tensor ranks: lower --tensor-parallel-size"),
        (model_of(layer_of()), Layout(1, 2), "1 layers cannot have 2 stages: lower --pipeline-parallel-size"),
        (model_of(WHOLE_NORMS), Layout(2), "layer 0 has one norm over the queries of all heads"),
        (model_of(layer_of(), SHARED_KEYS), Layout(1, 2), "attend to the keys of earlier ones"),
        (
            model_of(layer_of(), layer_of(), layer_inputs=LayerInputsSpec(size=4, vocab_size=9, activation="silu")),
            Layout(1, 2),
            "inputs by the token's id",
        ),
        (model_of(layer_of(attention=None, recurrent=DELTA)), Layout(7), "6 value heads"),
        (model_of(layer_of(feed_forward=FeedForwardSpec(size=2))), Layout(3), "2 neurons"),
        (model_of(layer_of(), vocab_size=1), Layout(2), "a vocabulary of 1"),
    ],
)
def test_what_cannot_be_split_is_refused(model: ModelSpec, layout: Layout, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        check_layout(model, layout)
    with pytest.raises(UsageError, match=what):
        shard_of(model, layout, Place(0, 0, 0))


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2), Layout(1, 1, 2)])
def test_models_of_transformers_are_refused(layout: Layout) -> None:
    model = TransformersModel(
        architecture="",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_position_embeddings=64,
        dtype="float32",
        num_weights=1,
        body="",
        layers=(),
    )
    with pytest.raises(UsageError, match="transformers computes"):
        check_layout(model, layout)
    check_layout(model, Layout())
