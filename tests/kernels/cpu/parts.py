"""What each of some peers has of a model with random weights: its rows and columns, cut by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs
from torch import Tensor

from eventlm.models.program import WeightKey
from eventlm.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
)
from tests.kernels.cpu.decoders import Weighted


class Member(NamedTuple):
    """The number of one of `size`, and of how many inputs its columns of neurons are a multiple."""

    size: int
    number: int
    granule: int = 32

    def cut(self, count: int, granule: int = 1) -> slice:
        """Its part of `count` things, whole granules. The first members have more, the last what is left."""
        pieces = math.ceil(count / granule)
        starts = [math.ceil(pieces * member / self.size) * granule for member in range(self.size + 1)]
        return slice(min(starts[self.number], count), min(starts[self.number + 1], count))


def part_of(source: Weighted, member: Member, *, splits_vocab: bool = True) -> Weighted:
    """The smaller model of a member, with its weights."""
    model = source.model
    smaller = structs.replace(model, layers=tuple(_layer(layer, member) for layer in model.layers))
    if splits_vocab:
        rows = member.cut(model.vocab_size)
        smaller = structs.replace(smaller, vocab_size=rows.stop - rows.start)
    return Weighted(
        smaller, {key: _cut(key, values, model, member, splits_vocab) for key, values in source.weights.items()}
    )


def vocab_starts(model: ModelSpec, size: int) -> list[int]:
    """As `DecoderPeers` wants them."""
    return [*(Member(size, number).cut(model.vocab_size).start for number in range(size)), model.vocab_size]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _layer(layer: LayerSpec, member: Member) -> LayerSpec:
    attention, recurrent, feed_forward = layer.attention, layer.recurrent, layer.feed_forward
    if attention is not None:
        count = _length(member.cut(attention.num_kv_heads))
        group = attention.num_heads // attention.num_kv_heads
        attention = structs.replace(attention, num_heads=count * group, num_kv_heads=count)
    if isinstance(recurrent, ConvolutionSpec):
        recurrent = structs.replace(recurrent, num_channels=_length(member.cut(recurrent.num_channels, 32)))
    if isinstance(recurrent, DeltaSpec):
        count = _length(member.cut(recurrent.num_key_heads))
        group = recurrent.num_value_heads // recurrent.num_key_heads
        recurrent = structs.replace(recurrent, num_key_heads=count, num_value_heads=count * group)
    if isinstance(feed_forward, ExpertsSpec):
        shared = None if feed_forward.shared is None else _neurons(feed_forward.shared, member)
        feed_forward = structs.replace(feed_forward, expert=_neurons(feed_forward.expert, member), shared=shared)
    else:
        feed_forward = _neurons(feed_forward, member)
    return structs.replace(layer, attention=attention, recurrent=recurrent, feed_forward=feed_forward)


def _neurons(part: FeedForwardSpec, member: Member) -> FeedForwardSpec:
    return structs.replace(part, size=_length(member.cut(part.size, member.granule)))


def _heads(part: slice, dim: int) -> list[int]:
    """Elements of heads that follow one another."""
    return list(range(part.start * dim, part.stop * dim))


def _cut(key: WeightKey, values: Tensor, model: ModelSpec, member: Member, splits_vocab: bool) -> Tensor:
    layer, is_bias = model.layers[key.layer], key.kind == "bias"
    if key.name in ("embedding", "lm_head"):
        return values[member.cut(model.vocab_size)] if splits_vocab else values
    if key.name in ("gate", "up", "down"):
        part = layer.dense if key.expert < 0 or layer.experts is None else layer.experts.expert
        assert part is not None
        own = member.cut(part.size, member.granule)
        if key.name == "down":
            return values if is_bias else values[:, own]
        return values[own]
    if key.name == "output":
        return values if is_bias else values[:, _inputs_of_output(layer, member)]
    if layer.attention is not None:
        rows = _rows_of_attention(key.name, layer.attention, member)
    else:
        assert layer.recurrent is not None
        rows = _rows_of_recurrent(key.name, layer.recurrent, member)
    return values if rows is None else values[rows]


def _inputs_of_output(layer: LayerSpec, member: Member) -> Sequence[int]:
    if layer.attention is not None:
        return _rows_of_attention("query", layer.attention, member) or ()
    if isinstance(layer.recurrent, DeltaSpec):
        return _rows_of_recurrent("delta_gate", layer.recurrent, member) or ()
    assert layer.recurrent is not None
    return range(layer.recurrent.num_channels)[member.cut(layer.recurrent.num_channels, 32)]


def _rows_of_attention(name: str, attention: AttentionSpec, member: Member) -> list[int] | None:
    """None: all."""
    own, group = member.cut(attention.num_kv_heads), attention.num_heads // attention.num_kv_heads
    queries = slice(own.start * group, own.stop * group)
    if name in ("query", "output_gate"):
        return _heads(queries, attention.head_dim)
    if name in ("key", "value"):
        return _heads(own, attention.head_dim)
    return _heads(queries, 1) if name == "sinks" else None


def _rows_of_recurrent(name: str, spec: ConvolutionSpec | DeltaSpec, member: Member) -> list[int] | None:
    if isinstance(spec, ConvolutionSpec):
        own = range(spec.num_channels)[member.cut(spec.num_channels, 32)]
        if name == "mixed":
            return [part * spec.num_channels + channel for part in range(3) for channel in own]
        return list(own) if name == "taps" else None
    keys = _heads(member.cut(spec.num_key_heads), spec.key_dim)
    values = list(_value_heads(spec, member))
    elements = [head * spec.value_dim + i for head in values for i in range(spec.value_dim)]
    if name in ("mixed", "taps"):
        size = spec.keys_size
        return [*keys, *(size + key for key in keys), *(2 * size + element for element in elements)]
    if name == "delta_gate":
        return elements
    return values if name in ("delta_beta", "delta_decay", "decay_rate", "decay_shift") else None


def _value_heads(spec: DeltaSpec, member: Member) -> Iterator[int]:
    own, group = member.cut(spec.num_key_heads), spec.num_value_heads // spec.num_key_heads
    if spec.is_interleaved:
        yield from (turn * spec.num_key_heads + head for turn in range(group) for head in range(own.start, own.stop))
    else:
        yield from range(own.start * group, own.stop * group)
