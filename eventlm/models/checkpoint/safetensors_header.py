"""The safetensors files of a checkpoint folder, and where their tensors lie. Loads no torch.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets) and the data; see
https://github.com/huggingface/safetensors, which checks that the tensors cover the data without gap or overlap. So the
header alone finds a download that was cut short.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from eventlm.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LFS_POINTER = b"version https://git-lfs"
#: Weights in other formats, named where there are no safetensors.
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack", "*.npz")


class TensorInfo(Struct, frozen=True):
    """One tensor of a file; `data_offsets` are bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FileStamp(NamedTuple):
    """Identifies a file and its content: another stamp means that it was replaced or changed."""

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
        """The length of the file."""
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
    other = ""
    if found:
        is_model = found[0].endswith(".gguf")
        other = (
            f"; to run {found[0]}, give its path"
            if is_model
            else f"; it has {found[0]}, and only safetensors weights are read"
        )
    return (
        f"neither {SINGLE_FILE} nor {INDEX_FILE}{other}; a model is a folder with config.json and safetensors weights"
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
            raise CheckpointError(f"{path}: tensor {name} is in {file_name!r}, which is not a file name")
    return index.weight_map


def read_header(path: Path) -> SafetensorsHeader:
    """The header of one file. CheckpointError if safetensors finds that it does not fit the file, as after a cut."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a file; a safetensors file must be there")
        with path.open("rb") as file:
            stamp = FileStamp.of(file.fileno())
            start = file.read(len(_LFS_POINTER))
            # It needs a framework, and numpy is the lightest. No tensor is read by it: it would map the file.
            with safe_open(path, framework="np"):
                file.seek(8)
            raw = file.read(int.from_bytes(start[:8], "little"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        problem = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        if "unknown variant" in problem:
            why = f"it has a tensor of a dtype that cannot be read: {problem}; take the model in bfloat16 or float16"
        else:
            why = not_downloaded(start) or f"cut short or damaged: {problem}; download it again"
        raise CheckpointError(f"{path}: {why}") from error
    entries = msgspec.json.decode(raw, type=dict[str, Any])
    entries.pop("__metadata__", None)
    return SafetensorsHeader(raw, msgspec.convert(entries, dict[str, TensorInfo]), 8 + len(raw), stamp)


def not_downloaded(start: bytes) -> str:
    """What a file is that was not downloaded, by its first bytes; empty if it may be the right one."""
    if not start:
        return "the file is empty; download it again"
    if start.startswith(_LFS_POINTER):
        return "this is a git-LFS pointer, not the file itself; run `git lfs pull` in its folder"
    if start.lstrip()[:1] == b"<":
        return "this is a web page, not the file itself; download it again"
    return ""


def tensors_by_offset(header: SafetensorsHeader) -> list[tuple[str, TensorInfo]]:
    """The file's tensors in the order of their data."""
    return sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
