"""Decoders that compute parts of a model together, against the one that computes all of it.

Members are threads of this process, each with a decoder of its own; those of one test are processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor

from eventlm.kernels.cpu.decoder import DecoderPeers, DrawRows
from eventlm.kernels.cpu.meeting import PeerGroup, create_segment, slot_bytes_for
from eventlm.kernels.cpu.native import PACKED_TYPES, MeetingEndedError, available_builds, column_granule
from eventlm.models.program import WeightKey
from eventlm.models.spec import ConvolutionSpec, DeltaSpec, FeedForwardSpec, LayerInputsSpec, LayerSpec
from eventlm.models.weights.decoder_weights import EMBEDDING, HEAD, model_weights
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Computed,
    Piece,
    Weighted,
    random_sequences,
    random_steps,
    relative_error,
    scattered_tables,
    with_random_weights,
)
from tests.kernels.cpu.parts import Member, part_of, vocab_starts
from tests.kernels.cpu.test_experts import experts, median_error
from tests.kernels.cpu.test_meeting import carried, in_threads, shared
from tests.kernels.cpu.test_packed import with_blocks
from tests.kernels.cpu.test_programs import LAYER, attention, layers, model

BUILDS_HERE = available_builds()
pytestmark = pytest.mark.skipif(not BUILDS_HERE, reason="no build of the forward pass is compiled")
MOST_TOKENS = 64
LENGTHS = [50, 1, 37, 20]
OF_ALL_LAYERS = ("embedding", "final_norm", "lm_head")
#: 9 query heads of 3 key heads.
UNEVEN = attention(num_heads=9, num_kv_heads=3)
RECURRENT = FeedForwardSpec(size=96)


def recurrent(spec: ConvolutionSpec | DeltaSpec) -> LayerSpec:
    return structs.replace(LAYER, attention=None, recurrent=spec, feed_forward=RECURRENT)


DELTA = DeltaSpec(num_key_heads=3, num_value_heads=6, key_dim=16, value_dim=32, num_taps=4)
MODELS = {
    "llama": model(*layers(UNEVEN, UNEVEN)),
    "tied, scaled, with norms after": model(
        *layers(*[attention(num_heads=6, num_kv_heads=3, has_output_gate=True)] * 2, norms="both"),
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        logits_multiplier=0.5,
        logits_soft_cap=4.0,
    ),
    "biases, sinks and multipliers": model(
        *layers(
            attention(has_sinks=True, has_qkv_bias=True, has_output_bias=True, num_heads=12, num_kv_heads=3),
            attention(has_sinks=True, has_qkv_bias=True, has_output_bias=True, qk_norm="head", window=20),
            feed_forward=FeedForwardSpec(size=224, activation="gelu", is_gated=False, has_bias=True),
            residual_multiplier=0.5,
        ),
        has_head_bias=True,
    ),
    "in parallel": model(*layers(UNEVEN, UNEVEN, norms="parallel"), norm={"kind": "layer", "has_bias": True}),
    "experts": model(
        structs.replace(
            LAYER,
            feed_forward=experts(11, 3, FeedForwardSpec(size=96), shared=FeedForwardSpec(size=160, has_bias=True)),
        ),
        structs.replace(
            LAYER,
            feed_forward=experts(
                8, 4, FeedForwardSpec(size=96, activation="swiglu_oai", has_bias=True), has_router_bias=True
            ),
        ),
    ),
    "experts beside a part with a gate": model(
        structs.replace(
            LAYER,
            norms="both",
            feed_forward=experts(6, 2, FeedForwardSpec(size=64), shared=FeedForwardSpec(size=96), has_shared_gate=True),
        ),
    ),
    "experts that are normed by themselves": model(
        structs.replace(
            LAYER,
            norms="both",
            feed_forward=experts(9, 3, FeedForwardSpec(size=64), shared=FeedForwardSpec(size=96), has_norms=True),
        ),
    ),
    "inputs of layers, shared keys and values that are keys": model(
        *layers(
            attention(window=20, qk_norm="head", has_value_norm=True),
            attention(values_are_keys=True, has_value_norm=True),
            attention(window=20, keys_of=0),
            norms="both",
            has_scale=True,
        ),
        layer_inputs=LayerInputsSpec(size=64, vocab_size=180, activation="gelu_tanh"),
    ),
    "convolutions": model(
        recurrent(ConvolutionSpec(num_channels=160, num_taps=3, has_bias=True)),
        structs.replace(LAYER, attention=UNEVEN),
    ),
    "delta rule": model(recurrent(DELTA), LAYER, recurrent(structs.replace(DELTA, is_interleaved=True))),
}


class Drawn(NamedTuple):
    """What a member gave for some sequences: the stream and logits of each of their tokens, and drawn tokens."""

    computed: list[Computed]
    greedy: list[int]
    noisy: list[int]


class Task(NamedTuple):
    """What all members do."""

    sequences: list[list[int]]
    tables: list[list[int]]
    steps: list[list[Piece]]

    @staticmethod
    def of(vocab_size: int, *, seed: int = 3) -> Task:
        steps = random_steps(LENGTHS, [0] * len(LENGTHS), seed=seed)
        small = [step for step in steps for step in _at_most(step, MOST_TOKENS)]
        return Task(random_sequences(vocab_size, LENGTHS), scattered_tables(LENGTHS, 16, 20), small)

    def run(self, decoder: CompiledDecoder) -> Drawn:
        computed = decoder.run(self.sequences, self.tables, self.steps)
        hidden_TH = torch.cat([each.hidden_TH for each in computed])[: MOST_TOKENS // 2].contiguous()
        count = len(hidden_TH)
        draws = [DrawRows([temperature] * count, range(100, 100 + count), range(count)) for temperature in (0.0, 1.5)]
        return Drawn(computed, *(decoder.decoder.draw_next(hidden_TH, rows) for rows in draws))


def _at_most(step: Sequence[Piece], most: int) -> list[list[Piece]]:
    """A step in as many as it takes, of whole pieces."""
    steps: list[list[Piece]] = [[]]
    for piece in step:
        if sum(each.end - each.start for each in (*steps[-1], piece)) > most:
            steps.append([])
        steps[-1].append(piece)
    return steps


def groups_of(kind: str, folder: Path, source: Weighted, size: int) -> list[Any]:
    slot_bytes = slot_bytes_for(MOST_TOKENS, source.model.hidden_size, source.model.vocab_size)
    if kind == "carried":
        return list(carried(size, slot_bytes))
    path = folder / "segment"
    create_segment(path, size=size, slot_bytes=slot_bytes)
    return [shared(path, size, number, slot_bytes) for number in range(size)]


def decoder_of(
    source: Weighted, group: PeerGroup, build: str, *, granule: int = 32, splits_vocab: bool = True, **options: Any
) -> CompiledDecoder:
    """A member's part of the model."""
    own = part_of(source, Member(group.size, group.number, granule), splits_vocab=splits_vocab)
    starts = vocab_starts(source.model, group.size) if splits_vocab else ()
    return CompiledDecoder(own, build, num_blocks=20, peers=DecoderPeers(group, starts), **options)


def all_of(groups: Sequence[PeerGroup], source: Weighted, build: str, task: Task, **options: Any) -> list[Drawn]:
    """What each member of a group gave."""
    found = in_threads(list(groups), lambda group: task.run(decoder_of(source, group, build, **options)))
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def check(found: list[Drawn], expected: Drawn) -> None:
    """All members gave the same, which is what the whole model gives, but for the order of float32 sums.

    Some tokens differ by more: where a sum decides how an input of a product is rounded to bfloat16.
    """
    for kind in (0, 1):
        whole = torch.cat([each[kind] for each in expected.computed])
        parts = [torch.cat([each[kind] for each in one.computed]) for one in found]
        assert median_error(parts[0], whole) < 1e-6, kind
        assert 0 <= relative_error(parts[0], whole) < 3e-3, kind
        assert all(torch.equal(part, parts[0]) for part in parts)
    assert all(one[1:] == found[0][1:] for one in found)
    for ids, wanted in zip(found[0][1:], expected[1:], strict=True):
        assert sum(one != other for one, other in zip(ids, wanted, strict=True)) <= 1


@pytest.mark.parametrize("build", BUILDS_HERE)
@pytest.mark.parametrize("name", MODELS)
def test_two_and_three_give_what_one_does(name: str, build: str, tmp_path: Path) -> None:
    source = with_random_weights(MODELS[name])
    task = Task.of(source.model.vocab_size)
    expected = task.run(CompiledDecoder(source, build, num_blocks=20))
    for size, num_threads in ((2, 1), (2, 3), (3, 2)):
        if size > min((each.num_kv_heads for each in source.model.attentions.values()), default=size):
            continue
        folder = tmp_path / f"{size} {num_threads}"
        folder.mkdir()
        found = all_of(groups_of("shared", folder, source, size), source, build, task, num_threads=num_threads)
        check(found, expected)


@pytest.mark.parametrize("name", ["llama", "experts", "delta rule"])
def test_any_transport_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    source = with_random_weights(MODELS[name])
    task = Task.of(source.model.vocab_size)
    one, other = (
        all_of(groups_of(kind, tmp_path, source, 2), source, BUILDS_HERE[0], task)[0] for kind in ("shared", "carried")
    )
    for mine, theirs in zip(one.computed, other.computed, strict=True):
        assert torch.equal(mine.hidden_TH, theirs.hidden_TH)
        assert torch.equal(mine.logits_TV, theirs.logits_TV)
    assert one[1:] == other[1:]


def test_a_vocabulary_need_not_be_split(tmp_path: Path) -> None:
    source = with_random_weights(MODELS["llama"])
    task = Task.of(source.model.vocab_size)
    expected = task.run(CompiledDecoder(source, BUILDS_HERE[0], num_blocks=20))
    groups = groups_of("shared", tmp_path, source, 2)
    check(all_of(groups, source, BUILDS_HERE[0], task, splits_vocab=False), expected)
    # One meeting for each sum, and no other.
    assert groups[0].num_meetings == 2 * source.model.num_layers * len(task.steps)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_int8(build: str, tmp_path: Path) -> None:
    """Scales are those of a member's inputs alone, so numbers are rounded otherwise, as roughly as those of one."""
    source = with_random_weights(MODELS["llama"])
    task = Task.of(source.model.vocab_size)
    exact, expected = (
        task.run(CompiledDecoder(source, build, num_blocks=20, quantization=quantization))
        for quantization in ("none", "int8")
    )
    found = all_of(
        groups_of("shared", tmp_path, source, 2),
        source,
        build,
        task,
        quantization="int8",
        granule=column_granule("int8"),
    )
    whole, ours, theirs = (torch.cat([each.logits_TV for each in one.computed]) for one in (exact, found[0], expected))
    assert relative_error(ours, whole) < 1.5 * relative_error(theirs, whole)


#: Columns that are 3 blocks of each.
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "I4_128", "F8_128"])
def test_codes(kind: str, tmp_path: Path) -> None:
    granule = column_granule(kind)
    size = 3 * granule
    whole = model(
        *layers(attention(num_heads=2, num_kv_heads=2, head_dim=granule), feed_forward=FeedForwardSpec(size=size)),
        hidden_size=256,
    )
    source, blocks = with_blocks(whole, dict.fromkeys(("query", "key", "value", "output", "gate", "up", "down"), kind))
    types = {(key.name, key.layer, key.expert): kind for key in blocks}
    task = Task.of(whole.vocab_size)
    expected = task.run(CompiledDecoder(source, BUILDS_HERE[0], num_blocks=20, types=types, blocks=blocks))

    def run(group: PeerGroup) -> Drawn:
        member = Member(group.size, group.number, granule)
        cut = {}
        for key, values in blocks.items():
            count = size if key.name in ("gate", "up", "down") else 2 * granule
            own = member.cut(count, granule)
            if key.name in ("down", "output"):
                step = PACKED_TYPES[kind].block_bytes
                cut[key] = values[:, own.start // granule * step : own.stop // granule * step]
            else:
                cut[key] = values[own]
        return task.run(decoder_of(source, group, BUILDS_HERE[0], granule=granule, types=types, blocks=cut))

    found = in_threads(groups_of("shared", tmp_path, source, 2), run)
    check(found, expected)


def test_granules_are_those_of_the_formats() -> None:
    assert [column_granule(kind) for kind in ("bfloat16", "int8", "Q8_0", "Q6_K", "I8_128")] == [32, 64, 32, 256, 128]


#: What members get that draw from logits that are equal, or no numbers.
EDGES: list[tuple[dict[tuple[int, int], float], list[int]]] = [
    ({}, [0]),
    ({(0, 100): 5.0, (0, 20): 5.0}, [20]),
    ({(0, 172): 5.0}, [172]),
    ({(0, 3): float("nan")}, [-1]),
    ({(0, 150): float("inf")}, [-1]),
]


@pytest.mark.parametrize(("changes", "wanted"), EDGES)
def test_the_lowest_of_equals_and_what_is_no_number(
    changes: dict[tuple[int, int], float], wanted: list[int], tmp_path: Path
) -> None:
    source = with_random_weights(model(LAYER, has_head_bias=True))
    for key, values in source.weights.items():
        if key.name == "lm_head":
            values.zero_()
            for (_, token), value in changes.items():
                if key.kind == "bias":
                    values[token] = value

    def draw(group: PeerGroup) -> tuple[list[int], Tensor]:
        decoder = decoder_of(source, group, BUILDS_HERE[0]).decoder
        hidden_TH = torch.ones(1, source.model.hidden_size)
        logits_TV = decoder.logits(hidden_TH)
        rows = DrawRows([0.0], [1], [0])
        assert decoder.draw(logits_TV, rows) == decoder.draw_next(hidden_TH, rows)
        return decoder.draw_next(hidden_TH, rows), logits_TV

    (first, logits_TV), (second, _) = in_threads(groups_of("shared", tmp_path, source, 2), draw)
    assert first == second == wanted
    assert logits_TV.shape == (1, source.model.vocab_size)


@pytest.mark.parametrize("name", ["tied, scaled, with norms after", "delta rule", "experts"])
def test_stages_hand_over_the_stream(name: str) -> None:
    """One layer after the other, each in a decoder of its own, gives the same bits."""
    source = with_random_weights(MODELS[name])
    whole, task = source.model, Task.of(source.model.vocab_size)
    expected = task.run(CompiledDecoder(source, BUILDS_HERE[0], num_blocks=20))
    stages = [stage_of(source, number) for number in range(whole.num_layers)]

    class Pipeline(CompiledDecoder):
        def __init__(self) -> None:
            self.decoder = stages[-1].decoder

        def step(
            self,
            sequences: Sequence[Sequence[int]],
            tables: Sequence[list[int]],
            pieces: Sequence[Piece],
            residual_TH: Tensor | None = None,
        ) -> Tensor:
            for stage in stages:
                residual_TH = stage.step(sequences, tables, pieces, residual_TH)
            assert residual_TH is not None
            return residual_TH

    found = task.run(Pipeline())
    for mine, theirs in zip(found.computed, expected.computed, strict=True):
        assert torch.equal(mine.hidden_TH, theirs.hidden_TH)
        assert torch.equal(mine.logits_TV, theirs.logits_TV)
    assert found[1:] == expected[1:]


def stage_of(source: Weighted, number: int) -> CompiledDecoder:
    """A layer. The first one embeds, the last one has the output matrix, neither has what it does not need."""
    whole = source.model
    spec = structs.replace(
        whole,
        layers=(whole.layers[number],),
        has_embedding=number == 0,
        has_lm_head=number + 1 == whole.num_layers,
        tie_word_embeddings=False,
    )

    def key_of(key: WeightKey) -> WeightKey:
        if key == HEAD and whole.tie_word_embeddings:
            return EMBEDDING
        return key if key.name in OF_ALL_LAYERS else key._replace(layer=number)

    weights = {key: source.weights[key_of(key)] for key in model_weights(spec)}
    return CompiledDecoder(Weighted(spec, weights), BUILDS_HERE[0], num_blocks=20)


def in_process(path: Path, number: int, pipe: Connection, slot_bytes: int) -> None:
    torch.set_num_threads(1)
    source = with_random_weights(MODELS["llama"])
    task = Task.of(source.model.vocab_size)
    group = shared(path, 2, number, slot_bytes)
    decoder = decoder_of(source, group, BUILDS_HERE[0])
    pipe.send([[part.tolist() for part in each] for each in task.run(decoder).computed])
    pipe.recv()


def test_processes_give_what_threads_do_and_notice_who_has_gone(tmp_path: Path) -> None:
    source = with_random_weights(MODELS["llama"])
    task = Task.of(source.model.vocab_size)
    slot_bytes = slot_bytes_for(MOST_TOKENS, source.model.hidden_size, source.model.vocab_size)
    [first, _] = all_of(groups_of("shared", tmp_path, source, 2), source, BUILDS_HERE[0], task)
    path = tmp_path / "of processes"
    create_segment(path, size=2, slot_bytes=slot_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_process, args=(path, 1, theirs, slot_bytes), daemon=True)
    process.start()
    try:
        group = shared(path, 2, 0, slot_bytes)
        decoder = decoder_of(source, group, BUILDS_HERE[0], num_threads=2)
        mine = task.run(decoder)
        other = [Computed(*(torch.tensor(part) for part in each)) for each in ours.recv()]
        for each, same, wanted in zip(mine.computed, other, first.computed, strict=True):
            assert torch.equal(each.hidden_TH, wanted.hidden_TH)
            assert torch.equal(same.hidden_TH, wanted.hidden_TH)
            assert torch.equal(same.logits_TV, wanted.logits_TV)
        process.kill()
        process.join()
        # The engine would say so; here it is this process.
        group.leave()
        for call in calls_of(decoder, task):
            with pytest.raises(MeetingEndedError, match="a peer has left or failed"):
                call()
    finally:
        process.kill()
        process.join()


def calls_of(decoder: CompiledDecoder, task: Task) -> list[Callable[[], Any]]:
    hidden_TH = torch.zeros(1, decoder.decoder._shape.hidden_size)
    return [
        lambda: decoder.step(task.sequences, task.tables, task.steps[0]),
        lambda: decoder.decoder.logits(hidden_TH),
        lambda: decoder.decoder.draw_next(hidden_TH, DrawRows([0.0], [1], [0])),
    ]


def test_a_step_of_another_size_ends_the_group(tmp_path: Path) -> None:
    source = with_random_weights(MODELS["llama"])
    task = Task.of(source.model.vocab_size)

    def run(group: PeerGroup) -> Any:
        decoder = decoder_of(source, group, BUILDS_HERE[0], num_threads=2)
        return decoder.step(task.sequences, task.tables, [Piece(0, 0, 10 + group.number)])

    found = in_threads(groups_of("shared", tmp_path, source, 2), run)
    assert {str(each) for each in found} == {"peers came to a meeting with different numbers of bytes"}


def test_what_does_not_fit(tmp_path: Path) -> None:
    source = with_random_weights(MODELS["llama"])
    [first, _] = groups_of("shared", tmp_path, source, 2)
    decoder = decoder_of(source, first, BUILDS_HERE[0])
    with pytest.raises(ValueError, match=r"^65 tokens take \d+ bytes, slots of a meeting have \d+$"):
        decoder.step([[0] * 65], [[0, 1, 2, 3, 4]], [Piece(0, 0, 65)])
    part = part_of(source, Member(2, 0))
    for starts in ([0, 100, 173], [0, 173]):
        with pytest.raises(ValueError, match=r"^member 0 of 2 with 87 rows of a vocabulary that is split at \[0, "):
            CompiledDecoder(part, BUILDS_HERE[0], peers=DecoderPeers(first, starts))
    wide = structs.replace(source.model, vocab_size=10**6)
    with pytest.raises(ValueError, match=r"^1000000 logits take 4000000 bytes, slots of a meeting have \d+$"):
        CompiledDecoder(Weighted(wide, {}), BUILDS_HERE[0], peers=DecoderPeers(first, [0, 10**6, 10**6]))


def test_parts_are_the_whole() -> None:
    for size, count, granule in itertools.product((1, 2, 3, 5), (7, 96, 173), (1, 32)):
        members = [Member(size, number).cut(count, granule) for number in range(size)]
        assert [i for part in members for i in range(part.start, part.stop)] == list(range(count))
        assert all(part.start % granule == 0 or part.start == count for part in members)
