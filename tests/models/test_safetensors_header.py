from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.safetensors_header import find_shards, read_header, tensors_by_offset


def write(path: Path, entries: dict[str, Any], data: bytes) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def test_header(tmp_path: Path) -> None:
    entries = {"b": entry(8, 16, [2]), "a": entry(0, 8, [1, 2]), "__metadata__": {"format": "pt"}}
    header = read_header(write(tmp_path / "model.safetensors", entries, bytes(16)))
    assert [name for name, _ in tensors_by_offset(header)] == ["a", "b"]
    assert header.tensors["a"].shape == (1, 2)
    assert header.file_bytes == header.data_start + 16


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry(0, 20, [5])},
        {"a": entry(8, 4, [1])},
        {"a": entry(-4, 0, [1])},
        {"a": entry(0, 0, [1])},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": 5},
    ],
)
def test_a_header_that_lies(tmp_path: Path, entries: dict[str, Any]) -> None:
    path = write(tmp_path / "model.safetensors", entries, bytes(16))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "2", "b": "1", "c": "2"}}')
    (tmp_path / "1").touch()
    (tmp_path / "2").touch()
    assert [path.name for path in find_shards(tmp_path)] == ["1", "2"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in find_shards(tmp_path)] == ["model.safetensors"]
