"""Which safetensors files a checkpoint folder has, and what their headers say. Loads no torch.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets) and the
data; see https://github.com/huggingface/safetensors. As there, the tensors must cover the data without gap or overlap.
So the header alone finds a download that was cut short.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
#: Bits of an element. A dtype that is not here is said to be unknown by whoever needs the tensor.
_DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
}
#: Weights in other formats, as they lie in folders that people take for ours.
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack", "*.npz")


class TensorInfo(Struct, frozen=True):
    """One tensor of a file; `data_offsets` are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FileStamp(NamedTuple):
    """What tells that a file is still the one that it was."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """Of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class SafetensorsHeader(Struct, frozen=True):
    """A file's header: its raw bytes, its tensors by name, where the data starts, and which file it was."""

    raw: bytes
    tensors: dict[str, TensorInfo]
    data_start: int
    stamp: FileStamp

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        return self.stamp.num_bytes


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
        raise CheckpointError(f"{folder}: {_without_weights(folder)}")
    names = sorted(set(read_index(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} names {missing[0]}, which is not there ({len(names) - len(missing)} of "
            f"{len(names)} files are); download the rest"
        )
    return [folder / name for name in names]


def _without_weights(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder; a model is a folder with config.json and safetensors weights"
    found = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    beside = f"; it has {found[0]}, and only safetensors weights are read" if found else ""
    return (
        f"neither {SINGLE_FILE} nor {INDEX_FILE}{beside}; a model is a folder with config.json and safetensors weights"
    )


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name. CheckpointError if the file is broken."""
    try:
        content = path.read_bytes()
        index = msgspec.json.decode(content, type=_Index)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {not_downloaded(content) or f'{error}; download it again'}") from error
    if not index.weight_map:
        raise CheckpointError(f"{path}: its weight_map is empty; download it again")
    for name, file_name in index.weight_map.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{path}: tensor {name} is said to be in {file_name!r}, not a file name")
    return index.weight_map


def read_header(path: Path) -> SafetensorsHeader:
    """The header of one file, checked against the file's length. CheckpointError says what is wrong with it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a file; a safetensors file must be there")
        with path.open("rb") as file:
            return _read_header(path, file)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def _read_header(path: Path, file: BinaryIO) -> SafetensorsHeader:
    stamp = FileStamp.of(file.fileno())
    start = file.read(len(_LFS_POINTER))
    file.seek(8)
    header_bytes = int.from_bytes(start[:8], "little")
    if stamp.num_bytes < 8 or not 2 <= header_bytes <= _MAX_HEADER_BYTES:
        problem = not_downloaded(start) or f"not a safetensors file ({stamp.num_bytes} bytes); download it again"
        raise CheckpointError(f"{path}: {problem}")
    if header_bytes > stamp.num_bytes - 8:
        raise CheckpointError(
            f"{path}: truncated: its header alone has {header_bytes} bytes, the file {stamp.num_bytes}; "
            "download it again"
        )
    raw = file.read(header_bytes)
    try:
        entries: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = msgspec.convert(entries, dict[str, TensorInfo])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: broken safetensors header: {error}; download it again") from error
    header = SafetensorsHeader(raw, tensors, 8 + header_bytes, stamp)
    _check_data(path, header)
    return header


def not_downloaded(start: bytes) -> str:
    """What a file is that was not downloaded, by its first bytes; empty if it may be the right one."""
    if not start:
        return "the file is empty; download it again"
    if start.startswith(_LFS_POINTER):
        return "this is a git-LFS pointer, not the file itself; run `git lfs pull` in its folder"
    if start.lstrip()[:1] == b"<":
        return "this is a web page, not the file itself; download it again"
    return ""


def _check_data(path: Path, header: SafetensorsHeader) -> None:
    """Every tensor takes what its shape and dtype need, right behind the one before, up to the end of the file."""
    data_bytes = header.file_bytes - header.data_start
    position = 0
    for name, tensor in tensors_by_offset(header):
        start, end = tensor.data_offsets
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {header.data_start + end}, "
                f"the file has {header.file_bytes}; download it again"
            )
        if start != position or end < start:
            raise CheckpointError(
                f"{path}: broken safetensors header: tensor {name} spans bytes {start} to {end}, "
                f"but the one before ends at {position}; download it again"
            )
        num_bytes = _num_bytes(tensor)
        if num_bytes is not None and num_bytes != end - start:
            raise CheckpointError(
                f"{path}: broken safetensors header: tensor {name} has {end - start} bytes, "
                f"{tensor.dtype} {list(tensor.shape)} takes {num_bytes}; download it again"
            )
        position = end
    if position != data_bytes:
        raise CheckpointError(
            f"{path}: {data_bytes - position} bytes behind the last tensor belong to none; download it again"
        )


def _num_bytes(tensor: TensorInfo) -> int | None:
    """By its shape; None for a dtype that is not known, and -1 for a shape that cannot be."""
    if any(size < 0 for size in tensor.shape):
        return -1
    bits = _DTYPE_BITS.get(tensor.dtype)
    return None if bits is None else math.prod(tensor.shape) * bits // 8


def tensors_by_offset(header: SafetensorsHeader) -> list[tuple[str, TensorInfo]]:
    """The file's tensors in the order of their data."""
    return sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
