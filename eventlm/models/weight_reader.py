"""Reads a checkpoint's weights piece by piece, the next piece while one is being used.

The file is read, not mapped as by safetensors: if a mapped file is cut short, the process dies, and its pages count as
memory of the process. A piece is small enough to stay in a cache between the copy and its use.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint_weights import StoredWeight, WeightFile
from eventlm.models.gguf.blocks import unpack
from eventlm.models.program import WeightKey
from eventlm.models.safetensors_header import FileStamp
from eventlm.types import OnProgress

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
#: Most bytes of a piece, and the multiple of rows that it has: as many are packed together.
_PIECE_BYTES = 4 << 20
_ROW_MULTIPLE = 32
_CHANGED = "the file was changed while it was read; start again when nothing writes to it"


class Piece(NamedTuple):
    """Rows of a matrix [rows, in] from `first_row` on, or a whole vector; `values` is valid until the next piece.

    A matrix that lies transposed is one piece. Values of one that was wanted in blocks are those, uint8 [rows, bytes].
    """

    key: WeightKey
    first_row: int
    values: Tensor


class _Part(NamedTuple):
    """Some rows of a weight, from `first_row` on, and where they lie in it. in_blocks: they stay what they are."""

    weight: StoredWeight
    first_row: int
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    in_blocks: bool


def read_pieces(
    files: Sequence[WeightFile], on_progress: OnProgress | None = None, *, in_blocks: Container[WeightKey] = ()
) -> Iterator[Piece]:
    """All weights of the files, in the order of their data. `on_progress` gets the bytes of those that were used.

    in_blocks: matrices of a GGUF file whose blocks are wanted as they are.

    Raises CheckpointError if a file cannot be read, or is no longer the one that was checked.
    """
    parts_of_files = [_parts(file, in_blocks) for file in files]
    num_bytes, total_bytes = 0, sum(part.num_bytes for parts in parts_of_files for part in parts)
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        for file, parts in zip(files, parts_of_files, strict=True):
            if not parts:
                continue
            with _opened(file) as opened:
                buffers = [torch.empty(max(part.num_bytes for part in parts), dtype=torch.uint8) for _ in range(2)]
                reading = reader.submit(_read, file.path, opened, parts[0], buffers[0])
                for number, part in enumerate(parts):
                    values = reading.result()
                    if number + 1 < len(parts):
                        after = buffers[(number + 1) % 2]
                        reading = reader.submit(_read, file.path, opened, parts[number + 1], after)
                    yield from _pieces(part, values)
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


def _parts(file: WeightFile, in_blocks: Container[WeightKey]) -> list[_Part]:
    """The file's weights in pieces."""
    parts = []
    for weight in file.weights:
        num_rows = weight.shape[0]
        num_values = math.prod(weight.shape[1:])
        row_bytes = weight.num_bytes // num_rows or num_values * _DTYPES[weight.dtype].itemsize
        is_kept = weight.key in in_blocks
        # Other blocks become float32.
        used_bytes = num_values * torch.float32.itemsize if weight.num_bytes and not is_kept else row_bytes
        multiple = math.lcm(_ROW_MULTIPLE, weight.head_rows or 1)
        is_whole = len(weight.shape) == 1 or bool(weight.interleaved)
        step = num_rows if is_whole else max(_PIECE_BYTES // used_bytes // multiple, 1) * multiple
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), *weight.shape[1:])
            parts.append(_Part(weight, first, shape, weight.offset + first * row_bytes, shape[0] * row_bytes, is_kept))
    return parts


def _pieces(part: _Part, values: Tensor) -> Iterator[Piece]:
    turns = part.weight.interleaved
    if not turns:
        yield Piece(part.weight.key, part.weight.first_row + part.first_row, values)
    for number, key in enumerate(turns):
        yield Piece(key, 0, values[..., number :: len(turns)].t())


def _read(path: Path, opened: BufferedReader, part: _Part, buffer: Tensor) -> Tensor:
    """The part's values. They may lie in the buffer, which is large enough for its bytes."""
    name = part.weight.name
    try:
        opened.seek(part.offset)
        num_read = opened.readinto(buffer.numpy().data[: part.num_bytes])
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {name}: {error.strerror or error}") from error
    if num_read != part.num_bytes:
        raise CheckpointError(f"{path}: tensor {name}: {_CHANGED}")
    return _values(part, buffer[: part.num_bytes])


def _values(part: _Part, data: Tensor) -> Tensor:
    weight = part.weight
    if part.in_blocks:
        values = data.view(part.shape[0], -1)
    elif weight.num_bytes:
        values = unpack(data.view(part.shape[0], -1), weight.dtype)
    else:
        values = data.view(_DTYPES[weight.dtype]).view(part.shape)
    if weight.head_rows:
        pairs = values.view(-1, weight.head_rows // 2, 2, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    return values.float() + weight.added if weight.added else values
