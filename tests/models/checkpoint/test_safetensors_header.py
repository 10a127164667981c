from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import find_shards, read_header, tensors_by_offset


def write(path: Path, entries: dict[str, Any], data: bytes) -> Path:
    return write_raw(path, json.dumps(entries).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_header(tmp_path: Path) -> None:
    entries = {"b": entry(8, 16, [2]), "a": entry(0, 8, [1, 2]), "__metadata__": {"format": "pt"}}
    header = read_header(write(tmp_path / "model.safetensors", entries, bytes(16)))
    assert [name for name, _ in tensors_by_offset(header)] == ["a", "b"]
    assert header.tensors["a"].shape == (1, 2)
    assert header.file_bytes == header.data_start + 16


@pytest.mark.parametrize("header_bytes", [ord("<"), 0x100 + ord("<"), 0x100 + ord(" ")])
def test_a_length_that_looks_like_text_is_none(tmp_path: Path, header_bytes: int) -> None:
    assert read_header(write_raw(tmp_path / "model.safetensors", b"{}".ljust(header_bytes))).tensors == {}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": entry(0, 20, [5])}, "file not fully covered"),
        ({"a": entry(0, 16, [5])}, "invalid shape, data type, or offset"),
        ({"a": entry(0, 16, [4], "I64")}, "invalid shape, data type, or offset"),
        ({"a": entry(0, 16, [-4])}, "invalid value: integer `-4`"),
        ({"a": entry(0, 0, [1])}, "invalid shape, data type, or offset"),
        ({"a": entry(8, 4, [1])}, "invalid offset for tensor `a`"),
        ({"a\nb": entry(8, 4, [1])}, "invalid offset for tensor `a b`"),
        ({"a": entry(-4, 0, [1])}, "invalid value: integer `-4`"),
        ({"a": entry(0, 12, [3]), "b": entry(8, 16, [2])}, "invalid offset for tensor `b`"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 16, [2])}, "invalid offset for tensor `b`"),
        ({"a": entry(0, 12, [3])}, "file not fully covered"),
        ({"a": entry(0, 1 << 70, [1])}, "invalid JSON"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "missing field `data_offsets`"),
        ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, "invalid JSON"),
        ({"a": 5}, "invalid JSON"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    found = error_of(write(tmp_path / "model.safetensors", entries, bytes(16)))
    assert found.startswith("cut short or damaged: ")
    assert message in found


def test_a_dtype_that_no_reader_knows_is_not_called_damage(tmp_path: Path) -> None:
    found = error_of(write(tmp_path / "model.safetensors", {"a": entry(0, 16, [4], "Q9")}, bytes(16)))
    assert found.startswith("it has a tensor of a dtype that cannot be read: ")
    assert "unknown variant `Q9`" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty; download it again"),
        (b"\2\0\0", "cut short or damaged: header too small; download it again"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "cut short or damaged: header too large"),
        ((1000).to_bytes(8, "little") + b"{}", "cut short or damaged: invalid header length"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "this is a git-LFS pointer, not the file"),
        (b"\n<!DOCTYPE html><p>Not found</p>", "this is a web page, not the file itself"),
        ((2).to_bytes(8, "little") + b"[]", "cut short or damaged: invalid JSON"),
        ((4).to_bytes(8, "little") + b'{"a"', "cut short or damaged: invalid JSON"),
        ((4).to_bytes(8, "little") + b'\xff"a"', "cut short or damaged: invalid UTF-8"),
        ((600_006).to_bytes(8, "little") + b'{"a":' + b"[" * 600_001, "recursion limit exceeded"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert message in error_of(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a file" in error_of(tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    assert "not a file" in error_of(tmp_path / "folder")
    assert error_of(tmp_path / "missing") == "No such file or directory"


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "2", "b": "1", "c": "2"}}')
    (tmp_path / "1").touch()
    (tmp_path / "2").touch()
    assert [path.name for path in find_shards(tmp_path)] == ["1", "2"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in find_shards(tmp_path)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty; download it again"),
        ("version https://git-lfs.github.com/spec/v1\n", "this is a git-LFS pointer"),
        ("{", "Input data was truncated; download it again"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": "../1"}}', "tensor a is in '../1', which is not a file name"),
        ('{"weight_map": {"a": "1", "b": "2"}}', "names 1, which is not there (0 of 2 files are); download the rest"),
        ('{"a":' + "[" * 600_000, "recursion"),
    ],
)
def test_an_index_that_is_of_no_use(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        find_shards(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_says_what_it_has_instead(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*index.json; a model is a folder"):
        find_shards(tmp_path)
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(CheckpointError, match=r"; to run model-q4\.gguf, give its path;"):
        find_shards(tmp_path)
    (tmp_path / "a.bin").touch()
    with pytest.raises(CheckpointError, match=r"it has a\.bin, and only safetensors weights are read;"):
        find_shards(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_shards(tmp_path / "nowhere")
