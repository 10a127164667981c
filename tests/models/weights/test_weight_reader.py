"""Pieces of a checkpoint's weights, and files that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import read_header, tensors_by_offset
from eventlm.models.program import WeightKey
from eventlm.models.weights import weight_reader
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile
from eventlm.models.weights.weight_reader import read_pieces


def file_of(path: Path, tensors: dict[str, torch.Tensor]) -> WeightFile:
    save_file(tensors, path)
    header = read_header(path)
    stored = [
        StoredWeight(
            WeightKey(name, 0, "weight"), name, info.dtype, info.shape, header.data_start + info.data_offsets[0]
        )
        for name, info in tensors_by_offset(header)
    ]
    return WeightFile(path, header.stamp, stored)


def test_pieces_make_up_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reader, "_PIECE_BYTES", 5000)
    tensors = {
        "bfloat16": torch.randn(101, 40, dtype=torch.bfloat16),
        "float16": torch.randn(33, 8, dtype=torch.float16),
        "float32": torch.randn(1, 3000),
        "float64": torch.randn(64, 2, dtype=torch.float64),
        "vector": torch.randn(4000),
    }
    files = [
        file_of(tmp_path / "1", {name: tensors[name] for name in ("bfloat16", "vector")}),
        WeightFile(tmp_path / "nothing of it is needed", read_header(tmp_path / "1").stamp, []),
        file_of(tmp_path / "2", {name: tensors[name] for name in ("float16", "float32", "float64")}),
    ]
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    sizes = []
    told: list[tuple[int, int]] = []
    for (name, *_), first_row, values in read_pieces(files, lambda *bytes_read: told.append(bytes_read)):
        assert first_row % 32 == 0
        found[name][first_row : first_row + len(values)] = values
        sizes.append((name, len(values)))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert [rows for name, rows in sizes if name == "bfloat16"] == [32, 32, 32, 5]
    assert ("vector", 4000) in sizes
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert len(told) == len(sizes)
    assert told == sorted(told)
    assert told[-1] == (num_bytes, num_bytes)


def test_interleaved_columns_are_rows_of_weights(tmp_path: Path) -> None:
    """Of an expert each, which is read at once."""
    matrices, vectors = torch.randn(3, 40, 14, dtype=torch.bfloat16), torch.randn(3, 14)
    file = file_of(tmp_path / "1", {"matrices": matrices, "vectors": vectors})
    wanted: dict[WeightKey, torch.Tensor] = {}
    stored = []
    for whole in file.weights:
        kind: Literal["weight", "bias"] = "weight" if whole.name == "matrices" else "bias"
        tensor = matrices if kind == "weight" else vectors
        for expert, values in enumerate(tensor):
            gate, up = (WeightKey(name, 0, kind, expert) for name in ("gate", "up"))
            wanted |= {gate: values[..., 0::2].t(), up: values[..., 1::2].t()}
            offset = whole.offset + expert * values.nbytes
            stored.append(whole._replace(key=gate, shape=tuple(values.shape), offset=offset, interleaved=(gate, up)))
    sizes: list[tuple[int, int]] = []
    pieces = read_pieces([file._replace(weights=stored)], lambda *sizes_read: sizes.append(sizes_read))
    found = {key: values.clone() for key, _, values in pieces}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    num_bytes = matrices.nbytes + vectors.nbytes
    # Two weights are one piece of the file.
    assert len(sizes) == 6
    assert sizes[-1] == (num_bytes, num_bytes)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 1))


def test_a_file_that_is_not_the_one_that_was_checked(tmp_path: Path) -> None:
    for number, change in enumerate((cut, replace, touch)):
        file = file_of(tmp_path / str(number), {"a": torch.ones(64, 64)})
        change(file.path)
        with pytest.raises(CheckpointError, match=rf"/{number}: the file was changed while it was read; start again"):
            next(read_pieces([file]))
    file.path.unlink()
    with pytest.raises(CheckpointError, match="/2: No such file or directory"):
        next(read_pieces([file]))


@pytest.mark.parametrize("change", [cut, touch])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_reader, "_PIECE_BYTES", 5000)
    file = file_of(tmp_path / "model.safetensors", {"a": torch.ones(320, 32)})
    pieces = read_pieces([file])
    next(pieces)
    change(file.path)
    with pytest.raises(
        CheckpointError, match=r"/model.safetensors: (tensor a: )?the file was changed while it was read"
    ):
        list(pieces)
