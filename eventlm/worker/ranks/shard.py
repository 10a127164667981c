"""What each rank has of a model: some layers, and of each some heads, channels and columns of neurons.

That is a smaller decoder, and a slice of the checkpoint's weight for each of its own. All tensor ranks have norms,
routers, and the biases of what they add up. Loads no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import gcd, lcm
from typing import NamedTuple

from msgspec import structs

from eventlm.core.shards import Layout, Place, deal_out, deal_out_granules
from eventlm.errors import UsageError
from eventlm.models.program import WeightKey
from eventlm.models.spec import (
    AttentionSpec,
    ConvolutionSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    RecurrentSpec,
)
from eventlm.models.transformers_model import ServedModel, TransformersModel
from eventlm.models.weights.decoder_weights import EMBEDDING, HEAD, model_weights
from eventlm.models.weights.matrix_types import MatrixFormats
from eventlm.models.weights.slices import ModelPart, Ranges, Slice, count_of, joined, shifted, spread
from eventlm.types import ceil_div

#: Channels that the compiled convolution computes together.
_CHANNELS = 16
_VOCABULARY = ("embedding", "lm_head")
#: Of the whole model, and on each rank that has any of them.
_OF_THE_WHOLE = ("final_norm", "inputs_embedding", "inputs_projection", "inputs_norm")
#: Matrices that are split by their outputs and weigh something.
_MIXING = frozenset(("query", "key", "value", "output_gate", "mixed", "delta_gate"))


class Shard(NamedTuple):
    """What a rank has of a model.

    model: the smaller one. Without an embedding it begins with the residual stream of the stage before, without an
    lm_head it ends with it. slices: of each of its weights. layers: their numbers in the whole model. vocab_starts:
    the first row of the vocabulary of each tensor rank, then how many rows there are.
    """

    model: ModelSpec
    slices: dict[WeightKey, Slice]
    layers: range
    vocab_starts: tuple[int, ...]

    @property
    def part(self) -> ModelPart:
        """For who loads it."""
        return ModelPart(self.model, self.slices)


class _Heads(NamedTuple):
    """What a rank has of the heads of a layer: of keys, and those of queries or values that they serve."""

    keys: range
    served: Ranges


class _Mixer(NamedTuple):
    """A rank's part of what a layer has before its neurons.

    rows: of the weights that are split by their outputs. inputs: the columns of `output`.
    """

    attention: AttentionSpec | None
    recurrent: RecurrentSpec | None
    rows: dict[str, Ranges]
    inputs: Ranges


class _Share(NamedTuple):
    """A rank's part of a layer. neurons: of what all tokens pass. expert_neurons: of each expert."""

    layer: LayerSpec
    mixer: _Mixer
    neurons: range
    expert_neurons: range


def check_layout(model: ServedModel, layout: Layout) -> None:
    """Raise UsageError, naming what stands against it, if a model cannot be split so."""
    if layout.num_ranks == 1:
        return
    if isinstance(model, TransformersModel):
        raise UsageError(
            "a model that transformers computes runs in one worker: leave out --tensor-parallel-size, "
            "--pipeline-parallel-size and --kv-parallel-size"
        )
    if layout.stages > model.num_layers:
        raise UsageError(
            f"a model of {model.num_layers} layers cannot have {layout.stages} stages: lower --pipeline-parallel-size"
        )
    if layout.tensor > 1 and (reason := next(_against_tensor_ranks(model, layout.tensor), "")):
        raise UsageError(reason)
    if layout.stages > 1 and (reason := _against_stages(model)):
        raise UsageError(f"{reason}: leave out --pipeline-parallel-size")


def shard_of(model: ModelSpec, layout: Layout, place: Place, formats: MatrixFormats | None = None) -> Shard:
    """What the rank at `place` has. formats: of the whole model's matrices, by which bytes even out.

    Raises UsageError like `check_layout`.
    """
    check_layout(model, layout)
    formats = formats or MatrixFormats()
    layers = stage_layers(model, layout.stages, formats)[place.stage]
    is_first, is_last = place.stage == 0, place.stage == layout.stages - 1
    vocabulary = _deal_vocabulary(model, layout.tensor)
    shares = _shares(model, layers, layout.tensor, formats, has_vocabulary=is_first or is_last)[place.tensor]
    smaller = structs.replace(
        model,
        vocab_size=len(vocabulary[place.tensor]),
        layers=tuple(share.layer for share in shares),
        has_embedding=is_first,
        has_lm_head=is_last,
        # The first stage keeps the embedding as one that is multiplied by too, in the same numbers as the last one's.
        tie_word_embeddings=model.tie_word_embeddings and is_first,
    )
    own_rows = vocabulary[place.tensor]
    slices = {key: _slice_of(key, model, layers, shares, own_rows) for key in model_weights(smaller)}
    starts = (*(rows.start for rows in vocabulary), model.vocab_size)
    return Shard(smaller, slices, layers, starts)


def group_slot_bytes(max_tokens: int, num_groups: int, model: ModelSpec) -> int:
    """What each KV group gives of a layer to the others at once, at most: maximum, sum and output in float32, for each
    head of each token whose context lies in several groups.

    max_tokens: that a group computes in a step. model: the part that a rank has.
    """
    # A token counts in each group that computes it.
    most = max_tokens * max(num_groups, 2) // 2
    attentions = [each for each in model.attentions.values() if isinstance(each, AttentionSpec)]
    return max((most * each.num_heads * (each.head_dim + 2) * 4 for each in attentions), default=0)


def stage_layers(model: ModelSpec, num_stages: int, formats: MatrixFormats | None = None) -> list[range]:
    """The layers of each stage, so that the largest has as few bytes as can be, its embedding and lm_head counted."""
    sizes = [0] * model.num_layers
    formats = formats or MatrixFormats()
    for key, shape in model_weights(model).items():
        if len(shape) == 2 and key.name not in _VOCABULARY:
            sizes[key.layer] += formats.of(key).num_bytes(*shape)
    sizes[0] += formats.of(EMBEDDING).num_bytes(model.vocab_size, model.hidden_size)
    head = EMBEDDING if model.tie_word_embeddings else HEAD
    sizes[-1] += formats.of(head).num_bytes(model.vocab_size, model.hidden_size) if num_stages > 1 else 0
    ends = [0, *itertools.accumulate(sizes)]
    # Of the layers up to each: the bytes of the largest stage, and the sum of squares, which evens out the others; then
    # where the last stage begins.
    best: list[list[tuple[int, int, int]]] = [[(ends[end], ends[end] ** 2, 0) for end in range(len(ends))]]
    for stage in range(1, num_stages):
        row = [(0, 0, 0)] * len(ends)
        for end in range(stage + 1, len(ends)):
            row[end] = min(
                (
                    max(best[-1][begin][0], ends[end] - ends[begin]),
                    best[-1][begin][1] + (ends[end] - ends[begin]) ** 2,
                    begin,
                )
                for begin in range(stage, end)
            )
        best.append(row)
    stages, end = [], model.num_layers
    for row in reversed(best):
        begin = row[end][2]
        stages.append(range(begin, end))
        end = begin
    return stages[::-1]


def _against_tensor_ranks(model: ModelSpec, size: int) -> Iterator[str]:
    lower = ": lower --tensor-parallel-size"
    for number, layer in enumerate(model.layers):
        attention, recurrent, experts = layer.attention, layer.recurrent, layer.experts
        if attention is not None and attention.num_heads < size:
            yield f"{attention.num_heads} query heads cannot be dealt out to {size} tensor ranks{lower}"
        if attention is not None and attention.qk_norm == "whole":
            yield (
                f"layer {number} has one norm over the queries of all heads, which no tensor rank has: leave out "
                "--tensor-parallel-size"
            )
        if isinstance(recurrent, DeltaSpec) and recurrent.num_value_heads < size:
            yield f"{recurrent.num_value_heads} value heads cannot be dealt out to {size} tensor ranks{lower}"
        if isinstance(recurrent, ConvolutionSpec) and recurrent.num_channels < size:
            yield f"{recurrent.num_channels} channels cannot be dealt out to {size} tensor ranks{lower}"
        for part in (layer.dense, experts.expert if experts is not None else None):
            if part is not None and part.size < size:
                yield f"{part.size} neurons cannot be dealt out to {size} tensor ranks{lower}"
    if model.vocab_size < size:
        yield f"a vocabulary of {model.vocab_size} cannot be dealt out to {size} tensor ranks{lower}"


def _against_stages(model: ModelSpec) -> str:
    if model.layer_inputs is not None:
        return "each layer of the model has inputs by the token's id, which later stages do not have"
    if any(attention.keys_of >= 0 for attention in model.attentions.values()):
        return "layers of the model attend to the keys of earlier ones, which may be on another stage"
    return ""


def _deal_vocabulary(model: ModelSpec, size: int) -> list[range]:
    return _deal_columns(model.vocab_size, size, (MatrixFormats().granule,))


def _deal_columns(count: int, size: int, granules: Sequence[int]) -> list[range]:
    """In granules of the first of these sizes of which there are enough."""
    granule = _fitting(count, size, granules)
    return deal_out(count, size) if granule == 1 else deal_out_granules(count, size, granule)


def _fitting(count: int, size: int, granules: Sequence[int]) -> int:
    return next((granule for granule in granules if ceil_div(count, granule) >= size), 1)


def _shares(
    model: ModelSpec, layers: range, size: int, formats: MatrixFormats, *, has_vocabulary: bool
) -> list[list[_Share]]:
    """Of each tensor rank, those of the layers."""
    #: What each has so far. The neurons even it out.
    num_bytes = [0] * size
    if has_vocabulary:
        for rank, rows in enumerate(_deal_vocabulary(model, size)):
            num_bytes[rank] += formats.of(EMBEDDING).num_bytes(len(rows), model.hidden_size)
    #: By the numbers of layers: who attends to the keys of an earlier one has its key heads.
    dealt: dict[int, list[_Heads]] = {}
    shares: list[list[_Share]] = [[] for _ in range(size)]
    for number in layers:
        for rank, share in enumerate(_shares_of_layer(model, number, num_bytes, formats, dealt)):
            shares[rank].append(share)
    return shares


def _shares_of_layer(
    model: ModelSpec, number: int, num_bytes: list[int], formats: MatrixFormats, dealt: dict[int, list[_Heads]]
) -> list[_Share]:
    """Of each rank. What it has is added to `num_bytes`."""
    layer, size, hidden = model.layers[number], len(num_bytes), model.hidden_size
    mixers = _deal_mixer(layer, number, size, formats, dealt)
    for rank, mixer in enumerate(mixers):
        for name in mixer.rows.keys() & _MIXING:
            own = formats.of(WeightKey(name, number, "weight"))
            num_bytes[rank] += own.num_bytes(count_of(mixer.rows[name]), hidden)
        output = formats.of(WeightKey("output", number, "weight"))
        num_bytes[rank] += output.num_bytes(hidden, count_of(mixer.inputs))
    neurons = expert_neurons = [range(0)] * size
    if layer.dense is not None:
        neurons = _deal_neurons(layer.dense, hidden, WeightKey("down", number, "weight"), num_bytes, formats)
    if (experts := layer.experts) is not None:
        first = WeightKey("down", number, "weight", 0)
        expert_neurons = _deal_neurons(experts.expert, hidden, first, num_bytes, formats, experts.num_experts)
    return [
        _Share(_smaller_layer(layer, mixer, len(own), len(of_expert)), mixer, own, of_expert)
        for mixer, own, of_expert in zip(mixers, neurons, expert_neurons, strict=True)
    ]


def _deal_mixer(
    layer: LayerSpec, number: int, size: int, formats: MatrixFormats, dealt: dict[int, list[_Heads]]
) -> list[_Mixer]:
    attention, recurrent = layer.attention, layer.recurrent
    block = formats.of(WeightKey("output", number, "weight")).block_inputs
    if attention is not None:
        keys = [heads.keys for heads in dealt[attention.keys_of]] if attention.keys_of >= 0 else None
        dealt[number] = _deal_attention(attention, size, block, keys)
        return [_attention_of(attention, heads) for heads in dealt[number]]
    if isinstance(recurrent, DeltaSpec):
        return [_delta_of(recurrent, heads) for heads in _deal_delta(recurrent, size, block)]
    assert recurrent is not None
    granules = (lcm(formats.granule, block), formats.granule, _CHANNELS)
    return [_convolution_of(recurrent, own) for own in _deal_columns(recurrent.num_channels, size, granules)]


def _deal_attention(
    spec: AttentionSpec, size: int, block: int, keys_of_ranks: Sequence[range] | None = None
) -> list[_Heads]:
    """keys_of_ranks: what each has to have of the heads of keys, if that is given."""
    group = spec.num_heads // spec.num_kv_heads
    if size > spec.num_kv_heads:
        return _split_groups(spec.num_kv_heads, group, size, block // gcd(block, spec.head_dim))
    if keys_of_ranks is None:
        keys_of_ranks = _deal_whole(spec.num_kv_heads, size, block // gcd(block, group * spec.head_dim))
    return [_Heads(keys, spread([keys], group)) for keys in keys_of_ranks]


def _deal_delta(spec: DeltaSpec, size: int, block: int) -> list[_Heads]:
    group = spec.num_value_heads // spec.num_key_heads
    if size > spec.num_key_heads:
        dealt = _split_groups(spec.num_key_heads, group, size, block // gcd(block, spec.value_dim))
    else:
        at_once = 1 if spec.is_interleaved else group
        whole = _deal_whole(spec.num_key_heads, size, block // gcd(block, at_once * spec.value_dim))
        dealt = [_Heads(keys, spread([keys], group)) for keys in whole]
    if not spec.is_interleaved:
        return dealt
    # Numbered by key head so far, and the heads of a key come in turns with those of others.
    return [_Heads(keys, _in_turns(keys, served, group, spec.num_key_heads)) for keys, served in dealt]


def _in_turns(keys: range, served: Ranges, group: int, num_keys: int) -> Ranges:
    turns = range(served[0].start - keys.start * group, served[-1].stop - keys.start * group)
    # Of several keys, all that they serve.
    turns = turns if len(keys) == 1 else range(group)
    return joined(range(turn * num_keys + keys.start, turn * num_keys + keys.stop) for turn in turns)


def _deal_whole(count: int, size: int, together: int) -> list[range]:
    """Groups of heads. `together`: so many make whole blocks of the output matrix, if there are enough for all."""
    return _deal_columns(count, size, (together,))


def _split_groups(num_keys: int, group: int, size: int, together: int) -> list[_Heads]:
    """Each head of keys is that of several ranks, which have parts of what it serves."""
    dealt = []
    for key, ranks in enumerate(deal_out(size, num_keys)):
        for part in _deal_columns(group, len(ranks), (together,)):
            dealt.append(_Heads(range(key, key + 1), shifted([part], key * group)))
    return dealt


def _attention_of(spec: AttentionSpec, heads: _Heads) -> _Mixer:
    keys, queries = spread([heads.keys], spec.head_dim), spread(heads.served, spec.head_dim)
    smaller = structs.replace(spec, num_heads=count_of(heads.served), num_kv_heads=len(heads.keys))
    rows = {"query": queries}
    if spec.has_output_gate:
        rows["output_gate"] = queries
    if spec.num_key_products:
        rows["key"] = keys
    if spec.num_value_products:
        rows["value"] = keys
    if spec.has_sinks:
        rows["sinks"] = heads.served
    return _Mixer(smaller, None, rows, queries)


def _delta_of(spec: DeltaSpec, heads: _Heads) -> _Mixer:
    keys, values = spread([heads.keys], spec.key_dim), spread(heads.served, spec.value_dim)
    mixed = joined((*keys, *shifted(keys, spec.keys_size), *shifted(values, 2 * spec.keys_size)))
    smaller = structs.replace(spec, num_key_heads=len(heads.keys), num_value_heads=count_of(heads.served))
    by_head = dict.fromkeys(("delta_beta", "delta_decay", "decay_rate", "decay_shift"), heads.served)
    return _Mixer(None, smaller, {"mixed": mixed, "taps": mixed, "delta_gate": values, **by_head}, values)


def _convolution_of(spec: ConvolutionSpec, own: range) -> _Mixer:
    channels = spec.num_channels
    mixed = joined(part for turn in range(3) for part in shifted([own], turn * channels))
    smaller = structs.replace(spec, num_channels=len(own))
    return _Mixer(None, smaller, {"mixed": mixed, "taps": (own,)}, (own,))


def _deal_neurons(
    part: FeedForwardSpec,
    hidden: int,
    down: WeightKey,
    num_bytes: list[int],
    formats: MatrixFormats,
    num_experts: int = 1,
) -> list[range]:
    """The columns of each rank; those with the least bytes get a granule more, so that bytes even out."""
    size, block = len(num_bytes), formats.of(down).block_inputs
    granule = _fitting(part.size, size, (lcm(formats.granule, block), formats.granule, _CHANNELS))
    names = ("gate", "up") if part.is_gated else ("up",)
    own_bytes = formats.of(down).num_bytes(hidden, granule)
    own_bytes += sum(formats.of(down._replace(name=name)).num_bytes(granule, hidden) for name in names)
    num_granules = ceil_div(part.size, granule)
    counts = [1] * size
    for rank in range(size):
        num_bytes[rank] += own_bytes * num_experts
    for _ in range(num_granules - size):
        least = min(range(size), key=num_bytes.__getitem__)
        counts[least] += 1
        num_bytes[least] += own_bytes * num_experts
    ends = [min(end * granule, part.size) for end in itertools.accumulate(counts, initial=0)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _smaller_layer(layer: LayerSpec, mixer: _Mixer, num_neurons: int, num_expert_neurons: int) -> LayerSpec:
    whole = layer.feed_forward
    smaller: FeedForwardSpec | ExpertsSpec
    if isinstance(whole, ExpertsSpec):
        shared = None if whole.shared is None else structs.replace(whole.shared, size=num_neurons)
        expert = structs.replace(whole.expert, size=num_expert_neurons)
        smaller = structs.replace(whole, expert=expert, shared=shared)
    else:
        smaller = structs.replace(whole, size=num_neurons)
    return structs.replace(layer, attention=mixer.attention, recurrent=mixer.recurrent, feed_forward=smaller)


def _slice_of(key: WeightKey, model: ModelSpec, layers: range, shares: Sequence[_Share], vocabulary: range) -> Slice:
    """Of the whole model's weight, for one of the smaller model."""
    if key.name in _VOCABULARY:
        is_tied = model.tie_word_embeddings and key == HEAD
        return Slice(EMBEDDING if is_tied else key, (vocabulary,))
    # Those of the whole model are layer 0's.
    if key.name in _OF_THE_WHOLE:
        return Slice(key)
    share, whole = shares[key.layer], key._replace(layer=layers[key.layer])
    neurons = share.neurons if key.expert < 0 else share.expert_neurons
    match key.name:
        case "gate" | "up":
            return Slice(whole, (neurons,))
        case "down" if key.kind == "weight":
            return Slice(whole, columns=(neurons,))
        case "output" if key.kind == "weight":
            return Slice(whole, columns=share.mixer.inputs)
    return Slice(whole, share.mixer.rows.get(key.name, ()))
