"""The compiled forward pass, in each build that this machine can run, against torch in float32 with the same weights.

Its error is compared with what bfloat16 costs in torch, where activations are rounded after each operation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eventlm.kernels.cpu.decoder import PARTS
from eventlm.kernels.cpu.native import BUILDS, NativeModel, available_builds, unsupported
from eventlm.models.config import read_model
from eventlm.models.cpu_kernels import native_model
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Piece,
    Shape,
    TorchDecoder,
    only,
    random_sequences,
    random_steps,
    relative_error,
    scattered_tables,
    write_checkpoint,
)

BUILDS_HERE = available_builds()
#: Where products of four rows and more have other instructions than those of fewer.
TILED = "amx"
FEWEST_TILE_ROWS = 4

SHAPES = {
    "llama": Shape(),
    "qwen3, tied, groups of 1": Shape(48, 101, 333, 2, 2, 64, qk_norm=True, tied=True),
    "biases, groups of 3": Shape(80, 77, 97, 3, 1, 80, attention_bias=True, mlp_bias=True),
    "groups of 7": Shape(112, 49, 65, 7, 1, 128, qk_norm=True),
    "groups of 8": Shape(96, 200, 31, 8, 1, 96, tied=True),
    "long heads": Shape(144, 33, 129, 4, 2, 256, attention_bias=True, tied=True),
    "odd number of heads": Shape(16, 1, 1000, 3, 3, 16, mlp_bias=True),
}
BLOCK_SIZES = (16, 32, 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / str(number), shape) for number, (name, shape) in enumerate(SHAPES.items())}


def test_a_build_is_here() -> None:
    """All others here would be empty."""
    assert BUILDS_HERE[-1:] == ["baseline"], "not compiled: run `make install` where a compiler is"
    assert [name for name in BUILDS if name in BUILDS_HERE] == BUILDS_HERE


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_schedules(folders: dict[str, Path], name: str) -> None:
    """Mixed steps over scattered blocks, the last sequence behind a prefix of the first one's."""
    shape = SHAPES[name]
    block_size = BLOCK_SIZES[list(SHAPES).index(name) % 3]
    shared = 2 * block_size
    sequences = random_sequences(shape.vocab, [shared + 37, 1, 17, 90, 64, 33])
    sequences.append([*sequences[0][:shared], *reversed(sequences[3][:40])])
    lengths = [len(sequence) for sequence in sequences]
    num_blocks = sum(lengths) // block_size + len(lengths) + 3
    tables = scattered_tables(lengths, block_size, num_blocks)
    tables[-1][:2] = tables[0][:2]
    starts = [0] * (len(lengths) - 1) + [shared]
    # The first one is whole before the last one reads its blocks, in the same step.
    steps = random_steps([*lengths[:-1], shared], starts, seed=3)
    first = Piece(0, 0, lengths[0])
    steps = [[first], *([piece for piece in pieces if piece.sequence] for pieces in steps)]
    steps = [pieces for pieces in steps if pieces]
    steps[0] += [Piece(6, shared, shared + 7), Piece(6, shared + 7, shared + 8), Piece(6, shared + 8, lengths[6])]

    exact = TorchDecoder(folders[name], "float32")
    rounded = TorchDecoder(folders[name], "bfloat16")
    expected = [exact.run(sequence) for sequence in sequences]
    in_torch = [rounded.run(sequence) for sequence in sequences]
    for build in BUILDS_HERE:
        decoder = CompiledDecoder(folders[name], build, block_size=block_size, num_blocks=num_blocks)
        found = decoder.run(sequences, tables, steps)
        for kind in (0, 1):
            want = torch.cat([each[kind][start:] for each, start in zip(expected, starts, strict=True)])
            theirs = torch.cat([each[kind][start:] for each, start in zip(in_torch, starts, strict=True)])
            own_error = relative_error(torch.cat([each[kind] for each in found]), want)
            assert own_error <= relative_error(theirs, want), (build, kind)
            assert own_error < 0.02, (build, kind)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_long_contexts(tmp_path: Path, build: str) -> None:
    """Decodes go over their context in passes of 1024 tokens; chunks do not."""
    shape = Shape(num_layers=1, num_heads=6)
    folder = write_checkpoint(tmp_path, shape)
    [sequence] = random_sequences(shape.vocab, [2080])
    expected = TorchDecoder(folder, "float32").run(sequence)
    rounded = TorchDecoder(folder, "bfloat16").run(sequence)
    around = [*range(1020, 1030), *range(2044, 2054)]
    chunks = [Piece(0, start, min(start + 333, 2080)) for start in range(0, 2080, 333)]
    tables = scattered_tables([2080], 32, 65)
    decoder = CompiledDecoder(folder, build, block_size=32, num_blocks=65, num_threads=2)
    whole = only(decoder.run([sequence], tables, [[piece] for piece in chunks]))
    decodes = only(decoder.run([sequence], tables, [[Piece(0, index, index + 1) for index in around]]))
    alone = only(decoder.run([sequence], tables, [[Piece(0, index, index + 1)] for index in around]))
    error = relative_error(rounded.logits_TV, expected.logits_TV)
    assert relative_error(whole.logits_TV, expected.logits_TV) <= error
    for found in (decodes, alone):
        assert relative_error(found.logits_TV, expected.logits_TV[around]) <= error
    if build != TILED:
        assert torch.equal(decodes.hidden_TH, alone.hidden_TH)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_steps_of_any_number_of_rows(folders: dict[str, Path], build: str) -> None:
    """A row's bits do not depend on how many others are in its step; with tiles, on whether there are four or more."""
    name = "biases, groups of 3"
    shape = SHAPES[name]
    [sequence] = random_sequences(shape.vocab, [70])
    expected = TorchDecoder(folders[name], "float32").run(sequence)
    tables = scattered_tables([70], 16, 5)
    first: dict[bool, torch.Tensor] = {}
    decoder = CompiledDecoder(folders[name], build, num_blocks=5)
    for num_rows in range(70, 0, -1):
        rows = [Piece(0, index, index + 1) for index in range(num_rows)]
        found = only(decoder.run([sequence], tables, [rows]))
        assert relative_error(found.logits_TV, expected.logits_TV[:num_rows]) < 0.02
        both = torch.cat(found, dim=1)
        most = first.setdefault(build == TILED and num_rows < FEWEST_TILE_ROWS, both)
        assert torch.equal(both, most[:num_rows]), num_rows


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_rows_around_the_borders_of_blocks(tmp_path: Path, build: str) -> None:
    """Inputs so wide that 64 rows are all that a product takes at once, heads that end within a panel."""
    shape = Shape(16, 24_600, 33, 2, 1, 48, attention_bias=True, num_layers=1)
    folder = write_checkpoint(tmp_path, shape)
    [sequence] = random_sequences(shape.vocab, [130])
    expected = TorchDecoder(folder, "float32").run(sequence)
    tables = scattered_tables([130], 16, 9)
    found: list[torch.Tensor] = []
    for num_threads in (1, 3):
        decoder = CompiledDecoder(folder, build, num_blocks=9, num_threads=num_threads)
        for num_rows in (130, 129, 128, 113, 97, 81, 80, 65, 64, 49, 48, 33, 32, 17, 16, 9):
            rows = [Piece(0, index, index + 1) for index in range(num_rows)]
            one = only(decoder.run([sequence], tables, [rows]))
            assert relative_error(one.logits_TV, expected.logits_TV[:num_rows]) < 0.02
            found.append(torch.cat(one, dim=1))
            assert torch.equal(found[-1], found[0][:num_rows]), (num_threads, num_rows)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_neighbours_and_chunks_do_not_change_bits(folders: dict[str, Path], build: str) -> None:
    """With tiles only the same rows give the same bits; elsewhere any steps do, contexts below a pass given."""
    name = "qwen3, tied, groups of 1"
    lengths = [71, 40, 100, 1, 16]
    sequences = random_sequences(SHAPES[name].vocab, lengths)
    tables = scattered_tables(lengths, 16, 20)
    schedules = [random_steps(lengths, [0] * 5, seed=seed) for seed in (1, 2)]
    runs = [CompiledDecoder(folders[name], build, num_blocks=20).run(sequences, tables, steps) for steps in schedules]
    again = CompiledDecoder(folders[name], build, num_blocks=20).run(sequences, tables, schedules[0])
    for one, other, repeated in zip(*runs, again, strict=True):
        assert torch.equal(one.hidden_TH, repeated.hidden_TH)
        assert torch.equal(one.logits_TV, repeated.logits_TV)
        assert relative_error(one.logits_TV, other.logits_TV) < 0.02
        if build != TILED:
            assert torch.equal(one.hidden_TH, other.hidden_TH)
            assert torch.equal(one.logits_TV, other.logits_TV)


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_threads_do_not_change_bits(folders: dict[str, Path], build: str) -> None:
    name = "llama"
    lengths = [1100, 3, 40, 9, 77]
    sequences = random_sequences(SHAPES[name].vocab, lengths)
    tables = scattered_tables(lengths, 16, 80)
    # The first one's last tokens are decodes in two passes.
    steps = [[Piece(0, 0, 1090)], *random_steps(lengths, [1090, 0, 0, 0, 0], seed=5)]
    runs = [
        CompiledDecoder(folders[name], build, num_blocks=80, num_threads=num_threads).run(sequences, tables, steps)
        for num_threads in (1, 2, 3)
    ]
    for one, two, three in zip(*runs, strict=True):
        for kind in (0, 1):
            assert torch.equal(one[kind], two[kind])
            assert torch.equal(one[kind], three[kind])


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_its_last_norm_and_its_times(folders: dict[str, Path], build: str) -> None:
    name = "llama"
    decoder = CompiledDecoder(folders[name], build)
    [sequence] = random_sequences(SHAPES[name].vocab, [9])
    before = decoder.decoder.times_ns()
    hidden_TH = decoder.step([sequence], [[3]], [Piece(0, 0, 9)])
    assert before == dict.fromkeys(PARTS, 0)
    assert {part for part, time in decoder.decoder.times_ns().items() if time == 0} == {
        *("recurrent", "layer_inputs", "router", "experts", "lm_head", "sample", "meeting", "add_parts")
    }
    exact = TorchDecoder(folders[name], "float32").decoder
    torch.testing.assert_close(decoder.decoder.norm(hidden_TH), exact.norm(hidden_TH))
    # Not contiguous, and none.
    assert torch.equal(decoder.decoder.norm(hidden_TH[::2]), decoder.decoder.norm(hidden_TH)[::2])
    assert decoder.decoder.norm(hidden_TH[:0]).shape == (0, 64)
    assert decoder.decoder.logits(hidden_TH[:0]).shape == (0, 384)


def test_what_is_not_supported(folders: dict[str, Path]) -> None:
    config = read_model(folders["llama"])

    def shape(**changes: int) -> NativeModel:
        changed = native_model(config)
        for name, value in changes.items():
            for part in (changed.shape, *changed.instructions):
                if getattr(part, name, 0):
                    setattr(part, name, value)
        return changed

    assert unsupported(shape(), 16) == ""
    assert unsupported(shape(vocab_size=1), 512) == ""
    assert unsupported(shape(), 4) == "blocks of 4 tokens are not a multiple of 16"
    assert unsupported(shape(), 24) == "blocks of 24 tokens are not a multiple of 16"
    assert unsupported(shape(head_dim=24), 16) == "heads of 24 are not a multiple of 16 up to 512"
    assert unsupported(shape(head_dim=528), 16) == "heads of 528 are not a multiple of 16 up to 512"
    assert unsupported(shape(hidden_size=72), 16) == "a hidden size of 72 is not a multiple of 16"
    assert unsupported(shape(num_heads=66, num_kv_heads=2), 16) == "33 query heads share a key"


@pytest.mark.parametrize("build", BUILDS_HERE)
def test_most_heads_that_may_share_a_key(tmp_path: Path, build: str) -> None:
    shape = Shape(num_heads=32, num_kv_heads=1)
    folder = write_checkpoint(tmp_path, shape)
    [sequence] = random_sequences(shape.vocab, [50])
    found = only(
        CompiledDecoder(folder, build).run([sequence], [[5, 2, 0, 9]], [[Piece(0, 0, 49)], [Piece(0, 49, 50)]])
    )
    expected, rounded = (TorchDecoder(folder, dtype).run(sequence) for dtype in ("float32", "bfloat16"))
    error = relative_error(found.logits_TV, expected.logits_TV)
    assert error <= relative_error(rounded.logits_TV, expected.logits_TV)


def test_bfloat16_is_not_worse_than_that_of_transformers(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    name = "llama"
    [sequence] = random_sequences(SHAPES[name].vocab, [200])
    ids = torch.tensor([sequence])
    with torch.inference_mode():
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()(ids).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    found = TorchDecoder(folders[name], "float32").run(sequence).logits_TV
    # The same operations; how a library sums them depends on the processor.
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=5e-5)
    agree = (rounded.argmax(dim=-1) == exact.argmax(dim=-1)).sum()
    for build in BUILDS_HERE:
        decoder = CompiledDecoder(folders[name], build)
        found = only(decoder.run([sequence], scattered_tables([200], 16, 64), [[Piece(0, 0, 200)]])).logits_TV
        assert relative_error(found, exact) <= relative_error(rounded, exact), build
        assert (found.argmax(dim=-1) == exact.argmax(dim=-1)).sum() >= agree, build


def test_a_step_takes_tokens_from_any_place_of_the_vocabulary(folders: dict[str, Path]) -> None:
    """Of an embedding of its own, and of one that is the output matrix."""
    for name in ("llama", "odd number of heads", "qwen3, tied, groups of 1"):
        vocab = SHAPES[name].vocab
        sequence = list(range(vocab - 1, -1, -1))
        expected = TorchDecoder(folders[name], "float32").run(sequence)
        for build in BUILDS_HERE:
            decoder = CompiledDecoder(folders[name], build)
            found = only(decoder.run([sequence], scattered_tables([vocab], 16, 64), [[Piece(0, 0, vocab)]]))
            assert relative_error(found.logits_TV, expected.logits_TV) < 0.02
