"""Which safetensors files a checkpoint folder has, and what their headers say. Loads no torch.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets) and the
data; see https://github.com/huggingface/safetensors. Reading the header alone finds a download that was cut
short.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000


class TensorInfo(Struct, frozen=True):
    """One tensor of a file; `data_offsets` are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(Struct, frozen=True):
    """A file's header: its raw bytes, its tensors by name, where the data starts and how long the file is."""

    raw: bytes
    tensors: dict[str, TensorInfo]
    data_start: int
    file_bytes: int


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


def find_shards(folder: Path) -> list[Path]:
    """The folder's weight files, in order of their names.

    CheckpointError if there are none or some are missing.
    """
    single = folder / SINGLE_FILE
    if single.exists():
        return [single]
    index = folder / INDEX_FILE
    if not index.exists():
        what = f"neither {SINGLE_FILE} nor {INDEX_FILE}" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {what}; a model is a folder with config.json and safetensors weights")
    names = sorted(set(read_index(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {INDEX_FILE} names {missing[0]}, which is not there")
    return [folder / name for name in names]


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name. CheckpointError if the file is broken."""
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, file_name in index.weight_map.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{path}: tensor {name} is said to be in {file_name!r}, not a file name")
    return index.weight_map


def read_header(path: Path) -> Header:
    """The header of one file, checked against the file's length."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(f"{path}: truncated or not a safetensors file ({file_bytes} bytes)")
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        entries: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = msgspec.convert(entries, dict[str, TensorInfo])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: broken safetensors header: {error}") from error
    header = Header(raw, tensors, 8 + header_bytes, file_bytes)
    _check_length(path, header)
    return header


def _check_length(path: Path, header: Header) -> None:
    data_bytes = header.file_bytes - header.data_start
    for name, tensor in tensors_by_offset(header):
        start, end = tensor.data_offsets
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {header.data_start + end}, "
                f"the file has {header.file_bytes}"
            )
        if not 0 <= start <= end or (math.prod(tensor.shape) == 0) != (start == end):
            raise CheckpointError(f"{path}: broken safetensors header: tensor {name} spans {start} to {end}")


def tensors_by_offset(header: Header) -> list[tuple[str, TensorInfo]]:
    """The file's tensors in the order of their data."""
    return sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
