"""The weights that a decoder has, and their shapes. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from eventlm.models.program import WeightKey
from eventlm.models.spec import AttentionSpec, ConvolutionSpec, FeedForwardSpec, ModelSpec, RecurrentSpec

#: With `tie_word_embeddings` they are one matrix, which a checkpoint has under either name or under both.
EMBEDDING, HEAD = WeightKey("embedding", 0, "weight"), WeightKey("lm_head", 0, "weight")
#: The norms of a layer, by `LayerSpec.norms`.
_NORMS = {
    "before": ("attention_norm", "feed_forward_norm"),
    "after": ("attention_out_norm", "feed_forward_out_norm"),
    "both": ("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm"),
    "parallel": ("attention_norm",),
}


def model_weights(model: ModelSpec) -> dict[WeightKey, tuple[int, ...]]:
    """Each weight of the decoder and its shape: a matrix [out, in] or a vector."""
    weights: dict[WeightKey, tuple[int, ...]] = {}
    for key, shape, has_bias in _weights(model):
        weights[key] = shape
        if has_bias:
            weights[key._replace(kind="bias")] = shape[:1]
    if model.has_head_bias and model.has_lm_head:
        weights[HEAD._replace(kind="bias")] = (model.vocab_size,)
    return weights


def _weights(model: ModelSpec) -> Iterator[tuple[WeightKey, tuple[int, ...], bool]]:
    """Each weight with its shape, and whether it has a bias."""
    hidden, norm, inputs = model.hidden_size, model.norm, model.layer_inputs
    if model.has_embedding:
        yield EMBEDDING, (model.vocab_size, hidden), False
    if inputs is not None:
        size = model.num_layers * inputs.size
        yield WeightKey("inputs_embedding", 0, "weight"), (inputs.vocab_size, size), False
        yield WeightKey("inputs_projection", 0, "weight"), (size, hidden), False
        yield WeightKey("inputs_norm", 0, "weight"), (inputs.size,), False
    for number in range(model.num_layers):
        for name, shape, has_bias in _weights_of_layer(model, number):
            yield WeightKey(name, number, "weight"), shape, has_bias
        layer = model.layers[number]
        if layer.dense is not None:
            yield from _weights_of_neurons(layer.dense, hidden, number)
        if layer.experts is not None:
            for expert in range(layer.experts.num_experts):
                yield from _weights_of_neurons(layer.experts.expert, hidden, number, expert)
    if norm.has_weight and model.has_lm_head:
        yield WeightKey("final_norm", 0, "weight"), (hidden,), norm.has_bias
    if model.has_lm_head and not model.tie_word_embeddings:
        yield HEAD, (model.vocab_size, hidden), False


def _weights_of_layer(model: ModelSpec, number: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """What it has beside neurons."""
    hidden, norm, layer = model.hidden_size, model.norm, model.layers[number]
    experts = layer.experts
    if norm.has_weight:
        for name in _NORMS[layer.norms]:
            yield name, (hidden,), norm.has_bias
    if layer.attention is not None:
        yield from _weights_of_attention(layer.attention, hidden)
    if layer.recurrent is not None:
        yield from _weights_of_recurrent(layer.recurrent, hidden)
    if model.layer_inputs is not None:
        yield "input_gate", (model.layer_inputs.size, hidden), False
        yield "input_up", (hidden, model.layer_inputs.size), False
        yield "input_out_norm", (hidden,), False
    if layer.has_scale:
        yield "layer_scale", (1,), False
    if experts is not None:
        yield "router", (experts.num_experts, hidden), experts.has_router_bias
        if experts.has_correction:
            yield "correction", (experts.num_experts,), False
        if experts.has_scales:
            yield "expert_scale", (experts.num_experts,), False
        if experts.has_norms:
            for name in ("router_norm", "experts_norm", "shared_out_norm", "experts_out_norm"):
                yield name, (hidden,), False
        if experts.has_shared_gate:
            yield "shared_scale", (1, hidden), False


def _weights_of_attention(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    query, key, value = (
        count * attention.head_dim
        for count in (attention.num_heads, attention.num_key_products, attention.num_value_products)
    )
    if attention.qk_norm != "none":
        is_whole = attention.qk_norm == "whole"
        yield "query_norm", (query if is_whole else attention.head_dim,), False
        if key:
            yield "key_norm", (key if is_whole else attention.head_dim,), False
    if attention.has_sinks:
        yield "sinks", (attention.num_heads,), False
    yield "query", (query, hidden), attention.has_qkv_bias
    if key:
        yield "key", (key, hidden), attention.has_qkv_bias
    if value:
        yield "value", (value, hidden), attention.has_qkv_bias
    if attention.has_output_gate:
        yield "output_gate", (query, hidden), attention.has_qkv_bias
    yield "output", (hidden, query), attention.has_output_bias


def _weights_of_recurrent(spec: RecurrentSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    channels = spec.num_channels
    if isinstance(spec, ConvolutionSpec):
        yield "mixed", (3 * channels, hidden), spec.has_bias
        yield "taps", (channels, spec.num_taps), spec.has_bias
        yield "output", (hidden, channels), spec.has_bias
        return
    heads, values = spec.num_value_heads, spec.values_size
    yield "mixed", (channels, hidden), False
    yield "delta_gate", (values, hidden), False
    yield "delta_beta", (heads, hidden), False
    yield "delta_decay", (heads, hidden), False
    yield "taps", (channels, spec.num_taps), False
    yield "decay_rate", (heads,), False
    yield "decay_shift", (heads,), False
    yield "delta_scale", (spec.value_dim,), False
    yield "output", (hidden, values), False


def _weights_of_neurons(
    part: FeedForwardSpec, hidden: int, layer: int, expert: int = -1
) -> Iterator[tuple[WeightKey, tuple[int, ...], bool]]:
    for name in ("gate", "up", "down") if part.is_gated else ("up", "down"):
        shape = (hidden, part.size) if name == "down" else (part.size, hidden)
        yield WeightKey(name, layer, "weight", expert), shape, part.has_bias
