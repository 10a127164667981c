"""Reads a checkpoint's weights piece by piece, the next piece while one is being used.

The file is read, not mapped as by safetensors: if a mapped file is cut short, the process dies, and its pages count as
memory of the process. A piece is small enough to stay in a cache between the copy and its use.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint_weights import WeightFile
from eventlm.models.safetensors_header import FileStamp
from eventlm.types import OnProgress

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
#: Most bytes of a piece, and the multiple of rows that it has: as many are packed together.
_PIECE_BYTES = 4 << 20
_ROW_MULTIPLE = 32
_CHANGED = "the file was changed while it was read; start again when nothing writes to it"


class Piece(NamedTuple):
    """Rows of a matrix [rows, in] from `first_row` on, or a whole vector; `values` is valid until the next piece."""

    name: str
    first_row: int
    values: Tensor


class _Part(NamedTuple):
    """Where a piece lies in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first_row: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_pieces(files: Sequence[WeightFile], on_progress: OnProgress | None = None) -> Iterator[Piece]:
    """All tensors of the files, in the order of their data. `on_progress` gets the bytes of those that were used.

    Raises CheckpointError if a file cannot be read, or is no longer the one that was checked.
    """
    parts_of_files = [_parts(file) for file in files]
    num_bytes, total_bytes = 0, sum(part.num_bytes for parts in parts_of_files for part in parts)
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        for file, parts in zip(files, parts_of_files, strict=True):
            if not parts:
                continue
            with _opened(file) as opened:
                buffers = [torch.empty(max(part.num_bytes for part in parts), dtype=torch.uint8) for _ in range(2)]
                reading = reader.submit(_read, file.path, opened, parts[0], buffers[0])
                for number, part in enumerate(parts):
                    reading.result()
                    if number + 1 < len(parts):
                        after = buffers[(number + 1) % 2]
                        reading = reader.submit(_read, file.path, opened, parts[number + 1], after)
                    values = buffers[number % 2][: part.num_bytes].view(part.dtype).view(part.shape)
                    yield Piece(part.name, part.first_row, values)
                    num_bytes += part.num_bytes
                    if on_progress is not None:
                        on_progress(num_bytes, total_bytes)


@contextlib.contextmanager
def _opened(file: WeightFile) -> Iterator[BufferedReader]:
    """The open file. CheckpointError if it is not, or no longer, the one that was checked."""
    try:
        opened = file.path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file.path}: {error.strerror or error}") from error
    with opened:
        _check_same(file, opened)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield opened
        _check_same(file, opened)


def _check_same(file: WeightFile, opened: BufferedReader) -> None:
    if FileStamp.of(opened.fileno()) != file.stamp:
        raise CheckpointError(f"{file.path}: {_CHANGED}")


def _parts(file: WeightFile) -> list[_Part]:
    """The file's tensors in pieces."""
    parts = []
    for tensor in file.tensors:
        dtype = _DTYPES[tensor.dtype]
        num_rows = tensor.shape[0]
        row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
        step = (
            num_rows if len(tensor.shape) == 1 else max(_PIECE_BYTES // row_bytes // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE
        )
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), *tensor.shape[1:])
            parts.append(_Part(tensor.name, dtype, shape, first, tensor.offset + first * row_bytes))
    return parts


def _read(path: Path, opened: BufferedReader, part: _Part, buffer: Tensor) -> None:
    """Fill the buffer with the part's bytes."""
    try:
        opened.seek(part.offset)
        num_read = opened.readinto(buffer.numpy().data[: part.num_bytes])
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {part.name}: {error.strerror or error}") from error
    if num_read != part.num_bytes:
        raise CheckpointError(f"{path}: tensor {part.name}: {_CHANGED}")
