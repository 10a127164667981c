"""Reads a checkpoint's weights piece by piece, the next piece while one is being used.

The file is read, not mapped as by safetensors: if a mapped file is cut short, the process dies, and its pages count as
memory of the process. A piece is small enough to stay in a cache between the copy and its use.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import FileStamp
from eventlm.models.gguf.blocks import unpack
from eventlm.models.program import WeightKey
from eventlm.models.weights.quantized_matrices import QuantizedMatrix, QuantizedPart
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile
from eventlm.models.weights.unpack import UnpackedMatrix, check_values
from eventlm.types import OnProgress

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
#: Most bytes of a piece, and the multiple of rows that it has: as many are packed together.
_PIECE_BYTES = 4 << 20
_ROW_MULTIPLE = 32
#: Of the data of each tensor in a buffer.
_ALIGNMENT = 64
_CHANGED = "the file was changed while it was read; start again when nothing writes to it"


class Piece(NamedTuple):
    """Rows of a matrix [rows, in] from `first_row` on, or a whole vector; `values` is valid until the next piece.

    A matrix that lies transposed is one piece. Values of one that was wanted as codes are their blocks, uint8
    [rows, bytes].
    """

    key: WeightKey
    first_row: int
    values: Tensor


class _Span(NamedTuple):
    """Bytes of a tensor that are read at once."""

    path: Path
    stamp: FileStamp
    name: str
    offset: int
    num_bytes: int


class _Part(NamedTuple):
    """Some rows of a weight, from `first_row` on, and where they lie. in_blocks: they stay what they are."""

    weight: StoredWeight
    first_row: int
    shape: tuple[int, ...]
    spans: tuple[_Span, ...]
    in_blocks: bool


class _Whole(NamedTuple):
    """A quantized matrix, and where its parts lie. types: of the weights that are wanted as codes."""

    matrix: QuantizedMatrix
    spans: tuple[_Span, ...]
    types: Mapping[WeightKey, str]


_Unit = _Part | _Whole


def read_pieces(
    files: Sequence[WeightFile],
    on_progress: OnProgress | None = None,
    *,
    in_blocks: Mapping[WeightKey, str] = MappingProxyType({}),
) -> Iterator[Piece]:
    """All weights of the files, in the order of their data. `on_progress` gets the bytes of those that were used.

    in_blocks: matrices that are wanted as codes, and their types (see `packed_types`).

    Raises CheckpointError if a file cannot be read, or is no longer the one that was checked, or if a quantized matrix
    has values that none has.
    """
    units = [unit for file in files for unit in _units(file, in_blocks)]
    sizes = [sum(_room(span) for span in unit.spans) for unit in units]
    num_bytes, total_bytes = 0, sum(span.num_bytes for unit in units for span in unit.spans)
    buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2)]
    with _Files() as opened, ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        reading = [reader.submit(_read, opened, units[0], buffers[0])] if units else []
        for number, unit in enumerate(units):
            pieces = reading.pop().result()
            if number + 1 < len(units):
                reading.append(reader.submit(_read, opened, units[number + 1], buffers[(number + 1) % 2]))
            yield from pieces
            num_bytes += sum(span.num_bytes for span in unit.spans)
            if on_progress is not None:
                on_progress(num_bytes, total_bytes)


def check_quantized(files: Sequence[WeightFile]) -> None:
    """Raise CheckpointError if a scale, a zero or an order of a quantized matrix cannot be one.

    They are a small part of the files, and are read for it: before there is memory for all weights.
    """
    with _Files() as opened:
        for matrix in (matrix for file in files for matrix in file.quantized):
            small = {name: part for name, part in matrix.parts.items() if part is not matrix.codes}
            data = {}
            for name, part in small.items():
                data[name] = torch.empty(part.num_bytes, dtype=torch.uint8)
                opened.read(_span(part), data[name])
            check_values(matrix, data)


class _Files(contextlib.ExitStack):
    """The files that are read from. Each must be the one that was checked, at the beginning and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, BufferedReader] = {}

    def read(self, span: _Span, to: Tensor) -> None:
        """Fill bytes. Raises CheckpointError."""
        if span.path not in self._opened:
            self._opened[span.path] = self.enter_context(_opened(span.path, span.stamp))
        file = self._opened[span.path]
        try:
            file.seek(span.offset)
            num_read = file.readinto(to.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{span.path}: tensor {span.name}: {error.strerror or error}") from error
        if num_read != span.num_bytes:
            raise CheckpointError(f"{span.path}: tensor {span.name}: {_CHANGED}")


@contextlib.contextmanager
def _opened(path: Path, stamp: FileStamp) -> Iterator[BufferedReader]:
    try:
        opened = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    with opened:
        _check_same(path, stamp, opened)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield opened
        _check_same(path, stamp, opened)


def _check_same(path: Path, stamp: FileStamp, opened: BufferedReader) -> None:
    if FileStamp.of(opened.fileno()) != stamp:
        raise CheckpointError(f"{path}: {_CHANGED}")


def _units(file: WeightFile, in_blocks: Mapping[WeightKey, str]) -> Iterator[_Unit]:
    """The file's weights, in pieces if they are large, and its quantized matrices."""
    for weight in file.weights:
        num_rows = weight.shape[0]
        num_values = math.prod(weight.shape[1:])
        row_bytes = weight.num_bytes // num_rows or num_values * _DTYPES[weight.dtype].itemsize
        is_kept = weight.key in in_blocks
        # Other blocks become float32.
        used_bytes = num_values * torch.float32.itemsize if weight.num_bytes and not is_kept else row_bytes
        is_whole = len(weight.shape) == 1 or bool(weight.interleaved)
        step = num_rows if is_whole else _rows_at_once(used_bytes, weight.head_rows or 1)
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), *weight.shape[1:])
            offset = weight.offset + first * row_bytes
            span = _Span(file.path, file.stamp, weight.name, offset, shape[0] * row_bytes)
            yield _Part(weight, first, shape, (span,), is_kept)
    for matrix in file.quantized:
        types = {key: in_blocks[key] for key in matrix.weights if key in in_blocks}
        yield _Whole(matrix, tuple(_span(part) for part in matrix.parts.values()), types)


def _span(part: QuantizedPart) -> _Span:
    return _Span(part.path, part.stamp, part.name, part.offset, part.num_bytes)


def _rows_at_once(row_bytes: int, multiple: int = 1) -> int:
    multiple = math.lcm(_ROW_MULTIPLE, multiple)
    return max(_PIECE_BYTES // row_bytes // multiple, 1) * multiple


def _pieces(unit: _Part, values: Tensor) -> Iterator[Piece]:
    turns = unit.weight.interleaved
    if not turns:
        yield Piece(unit.weight.key, unit.weight.first_row + unit.first_row, values)
    for number, key in enumerate(turns):
        yield Piece(key, 0, values[..., number :: len(turns)].t())


def _pieces_of_quantized(unit: _Whole, matrix: UnpackedMatrix) -> Iterator[Piece]:
    at_once = _rows_at_once(unit.matrix.num_in * torch.float32.itemsize)
    for key, runs in unit.matrix.weights.items():
        kind = unit.types.get(key)
        numbers = runs[0] if len(runs) == 1 else [*itertools.chain(*runs)]
        for first in range(0, len(numbers), at_once):
            rows = numbers[first : first + at_once]
            yield Piece(key, first, matrix.blocks(kind, rows) if kind else matrix.values(rows))


def _room(span: _Span) -> int:
    """Bytes of a buffer: data of any dtype may begin where it ends."""
    return -(-span.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _read(opened: _Files, unit: _Unit, buffer: Tensor) -> Iterator[Piece]:
    """The unit's pieces. Their values may lie in the buffer, which is large enough for its bytes."""
    begin, data = 0, []
    for span in unit.spans:
        data.append(buffer[begin : begin + span.num_bytes])
        opened.read(span, data[-1])
        begin += _room(span)
    if isinstance(unit, _Whole):
        matrix = UnpackedMatrix(unit.matrix, dict(zip(unit.matrix.parts, data, strict=True)))
        return _pieces_of_quantized(unit, matrix)
    return _pieces(unit, _values(unit, *data))


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
    if weight.exponentials:
        if not bool((values < 0).all()):
            path = part.spans[0].path
            raise CheckpointError(f"{path}: tensor {weight.name} has numbers that are not negative; download it again")
        values = (-values.float()).log()
    return values.float() + weight.added if weight.added else values
