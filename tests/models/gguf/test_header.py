"""Headers of GGUF files: sound ones are read as gguf-py reads them, all others are refused at once and in one line."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from eventlm.errors import CheckpointError
from eventlm.models.gguf.config_json import config_json
from eventlm.models.gguf.header import TENSOR_TYPES, part_paths, read_header, read_parts
from eventlm.models.gguf.tokenizer_json import tokenizer_files
from tests.models.gguf.files import finish
from tests.models.tiny_gguf import write_gguf

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6


class Bytes:
    """A header, field by field. `lengths` are the places of numbers that say how much follows."""

    def __init__(self) -> None:
        self.data = b""
        self.lengths: list[tuple[int, int]] = []

    def number(self, value: int, num_bytes: int = 4) -> None:
        self.data += value.to_bytes(num_bytes, "little")

    def length(self, value: int, num_bytes: int = 8) -> None:
        self.lengths.append((len(self.data), num_bytes))
        self.number(value, num_bytes)

    def string(self, text: str) -> None:
        self.length(len(text.encode()))
        self.data += text.encode()


def header(*, version: int = 3, alignment: int = 32, tensors: list[dict[str, Any]] | None = None) -> Bytes:
    """A sound header with each kind of value; `tensors` overrides fields of its tensors, by their order."""
    made = Bytes()
    made.data = b"GGUF"
    made.number(version)
    described = [
        {"name": "a.weight", "sizes": [64, 2], "kind": 0, "offset": 0},
        {"name": "b.weight", "sizes": [64, 3], "kind": 8, "offset": 512},
    ]
    for tensor, changes in zip(described, tensors or [], strict=False):
        tensor |= changes
    made.length(len(described))
    made.length(4)
    made.string("general.alignment")
    made.number(UINT32)
    made.number(alignment)
    made.string("general.name")
    made.number(STRING)
    made.string("tiny")
    made.string("tokenizer.ggml.tokens")
    made.number(ARRAY)
    made.number(STRING)
    made.length(3)
    for token in ("<s>", "é", ""):
        made.string(token)
    made.string("tokenizer.ggml.scores")
    made.number(ARRAY)
    made.number(FLOAT32)
    made.length(2)
    made.data += struct.pack("<2f", 0.5, -1.0)
    for tensor in described:
        made.string(tensor["name"])
        made.length(len(tensor["sizes"]), 4)
        for size in tensor["sizes"]:
            made.length(size)
        made.length(tensor["kind"], 4)
        made.length(tensor["offset"])
    return made


def whole(made: Bytes, data: int = 512 + 3 * 2 * 34) -> bytes:
    return made.data + bytes(-len(made.data) % 32) + bytes(data)


def error_of(path: Path, content: bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    words = str(caught.value)
    assert words.startswith(f"{path}: ")
    assert words.isprintable()
    assert len(words) < 600
    return words.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_it_says_what_gguf_py_says(path: Path) -> None:
    write_gguf(path)
    found, reader = read_header(path), GGUFReader(path)
    assert {key: found.metadata[key] for key in reader.fields if not key.startswith("GGUF.")} == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert [(each.name, each.type, list(each.shape), each.offset, each.num_bytes) for each in found.tensors] == [
        (each.name, each.tensor_type.name, each.shape[::-1].tolist(), each.data_offset, each.n_bytes)
        for each in sorted(reader.tensors, key=lambda each: each.data_offset)
    ]


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(path: Path, version: int) -> None:
    path.write_bytes(whole(header(version=version)))
    found = read_header(path)
    assert found.metadata == {
        "general.alignment": 32,
        "general.name": "tiny",
        "tokenizer.ggml.tokens": ["<s>", "é", ""],
        "tokenizer.ggml.scores": [0.5, -1.0],
    }
    start = len(whole(header(), 0))
    assert [(each.name, each.type, each.shape, each.offset - start, each.num_bytes) for each in found.tensors] == [
        ("a.weight", "F32", (2, 64), 0, 512),
        ("b.weight", "Q8_0", (3, 64), 512, 204),
    ]
    path.write_bytes(whole(header(version=version, alignment=64)))
    assert read_header(path).metadata["general.alignment"] == 64


def test_long_strings_and_vocabularies_are_read_whole(path: Path) -> None:
    """Longer than what is read at once."""
    writer = GGUFWriter(path, "llama")
    tokens = [f"{number}é" * (number % 5) for number in range(300_000)]
    writer.add_token_list(tokens)
    writer.add_string("long", "x" * 3_000_000)
    writer.add_array("longest", ["y" * 2_000_000, "", "z"])
    writer.add_tensor("a.weight", np.zeros((1, 32), np.float32))
    finish(writer)
    found = read_header(path)
    assert found.metadata["tokenizer.ggml.tokens"] == tokens
    assert found.metadata["long"] == "x" * 3_000_000
    assert found.metadata["longest"] == ["y" * 2_000_000, "", "z"]
    assert len(found.raw) < found.tensors[0].offset < len(found.raw) + 32


def test_a_file_that_ends_early_is_refused_wherever_it_ends(path: Path) -> None:
    content = whole(header())
    for end in (*range(len(header().data)), *range(len(header().data), len(content), 64)):
        words = error_of(path, content[:end])
        assert ("download it again" in words) or end < 4, (end, words)
    write_gguf(path)
    content = path.read_bytes()
    for end in range(0, len(content), 4096):
        error_of(path, content[:end])


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1, 1 << 32, 1 << 31, 1 << 24])
def test_no_length_is_believed(path: Path, value: int) -> None:
    made = header()
    content = whole(made)
    tracemalloc.start()
    try:
        for place, num_bytes in made.lengths:
            number = (value & ((1 << 8 * num_bytes) - 1)).to_bytes(num_bytes, "little")
            if int.from_bytes(number, "little"):
                assert "again" in error_of(path, content[:place] + number + content[place + num_bytes :]), place
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_damaged_files_raise_nothing_else(path: Path) -> None:
    """One to three bytes of a sound model's header are others, or some are gone, or there twice."""
    write_gguf(path)
    content, rng = path.read_bytes(), random.Random(1)
    num_read, errors = 0, []
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(read_header_bytes(content)))
            match rng.randrange(4):
                case 0:
                    damaged[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
                case 1:
                    damaged[place] = rng.randrange(256)
                case 2:
                    del damaged[place : place + rng.randrange(1, 9)]
                case 3:
                    damaged[place:place] = damaged[place : place + rng.randrange(1, 9)]
        path.write_bytes(damaged)
        try:
            headers = read_parts([path])
            num_read += 1
            tokenizer_files(headers[0], config_json(headers)["vocab_size"])
        except CheckpointError as error:
            errors.append(str(error))
    assert [error for error in errors if not error.isprintable()] == []
    assert num_read > 20


def read_header_bytes(content: bytes) -> bytes:
    return content[: content.index(b"blk.0.attn_q") + 200]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty; download it again"),
        (b"<html>not found</html>" * 9, "this is a web page, not the file itself; download it again"),
        (b"version https://git-lfs.github.com/spec/v1", "git-LFS pointer, not the file itself"),
        (b"PK\3\4" * 20, "this is not a GGUF file: it begins with b'PK"),
        (whole(header(version=1)), "GGUF version 1 is not supported (supported: 2, 3)"),
        (whole(header(version=4)), "GGUF version 4 is not supported"),
        (whole(header(version=3 << 24)), "its numbers are big-endian, and only little-endian files can be read"),
        (whole(header(alignment=24)), "key general.alignment is 24, it must be a power of two from 8 on"),
        (
            whole(header(tensors=[{"kind": 19}])),
            "tensor a.weight is of type IQ1_S, which cannot be run (supported: F32",
        ),
        (whole(header(tensors=[{"kind": 34}])), "tensor a.weight is of type TQ1_0, which cannot be run"),
        (whole(header(tensors=[{"kind": 27}])), "tensor a.weight is of type I64, which cannot be run"),
        (whole(header(tensors=[{"kind": 4}])), "tensor a.weight has type 4, which is not known here"),
        (whole(header(tensors=[{"name": "b.weight"}])), "tensor b.weight is there twice"),
        (whole(header(tensors=[{"name": ""}])), "tensor 1 of 2 has no name"),
        (whole(header(tensors=[{"name": "a\nb"}, {"offset": 64}])), r"tensors 'a\nb' and b.weight overlap"),
        (whole(header(tensors=[{}, {"offset": 480}])), "tensors a.weight and b.weight overlap"),
        (whole(header(tensors=[{}, {"offset": 520}])), "tensor b.weight is at 520, which is no multiple of 32"),
        (whole(header(tensors=[{}, {"offset": 544}])), "tensor b.weight ends at"),
        (whole(header(tensors=[{}, {"sizes": [48, 4]}])), "has rows of 48, and Q8_0 has blocks of 32"),
        (whole(header(tensors=[{"sizes": [64, 0]}])), "tensor a.weight has the sizes [64, 0]"),
        (whole(header(tensors=[{"sizes": [1 << 62, 1 << 62]}])), "tensor a.weight has the sizes [4611686018427387904,"),
        (whole(header(tensors=[{"sizes": []}])), "tensor a.weight has 0 dimensions"),
        (whole(header(tensors=[{"sizes": [2] * 5}])), "tensor a.weight has 5 dimensions"),
        (whole(header()).replace(b"general.name", b"\xff" * 12), "a string is not UTF-8"),
        (whole(header()).replace(b"general.name\x08", b"general.name\x0d"), "key general.name has a value of type 13"),
        (
            whole(header()).replace(b"tokens\x09\0\0\0\x08", b"tokens\x09\0\0\0\x09"),
            "key tokenizer.ggml.tokens is an array of arrays",
        ),
        (
            whole(header()).replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"),
            "tokenizer.ggml.tokens is there twice",
        ),
    ],
)
def test_what_is_wrong_is_told(content: bytes, words: str, path: Path) -> None:
    assert words in error_of(path, content)


def test_what_is_no_file_is_told(tmp_path: Path, path: Path) -> None:
    assert error_of(tmp_path) == "not a file; give a GGUF file"
    assert error_of(path) == "No such file or directory"


def test_all_types_are_known_to_gguf_py() -> None:
    assert {GGMLQuantizationType[name].name for name in TENSOR_TYPES} == set(TENSOR_TYPES)


def write_part(path: Path, number: int, count: int, tensor: str, num_tensors: int | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    if num_tensors is not None:
        writer.add_int32("split.tensors.count", num_tensors)
    writer.add_tensor(tensor, np.zeros((1, 32), np.float32))
    finish(writer)
    return path


Change = Callable[[Path, Path], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one, two: None, ""),
        (lambda one, two: two.unlink(), "part 2 of 2 is missing"),
        (lambda one, two: two.write_bytes(one.read_bytes()), "by its metadata it is part 1 of 2, by its name part 2"),
        (lambda one, two: write_part(two, 1, 2, "a"), "tensor a is in a-00001-of-00002.gguf too"),
        (lambda one, two: write_part(one, 0, 2, "a", 3), "its parts have 2 tensors, by its metadata they have 3"),
        (lambda one, two: write_part(two, 1, 3, "b"), "by its metadata it is part 2 of 3"),
    ],
)
def test_parts_belong_together(change: Change, words: str, tmp_path: Path) -> None:
    one = write_part(tmp_path / "a-00001-of-00002.gguf", 0, 2, "a", 2)
    two = write_part(tmp_path / "a-00002-of-00002.gguf", 1, 2, "b")
    change(one, two)
    if not words:
        assert part_paths(one) == part_paths(two) == [one, two]
        assert [header.tensors[0].name for header in read_parts([one, two])] == ["a", "b"]
        return
    with pytest.raises(CheckpointError) as caught:
        read_parts(part_paths(one))
    assert words in str(caught.value)


def test_a_part_alone_is_told(tmp_path: Path) -> None:
    path = write_part(tmp_path / "renamed.gguf", 0, 2, "a", 2)
    with pytest.raises(CheckpointError, match="by its metadata it is part 1 of 2, by its name part 1 of 1; give the"):
        read_parts(part_paths(path))
