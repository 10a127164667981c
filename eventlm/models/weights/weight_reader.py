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

import numpy as np
import torch
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu.native import PACKED_TYPES
from eventlm.models.checkpoint.safetensors_header import FileStamp
from eventlm.models.gguf.blocks import unpack
from eventlm.models.program import WeightKey
from eventlm.models.weights.quantized_matrices import QuantizedMatrix, QuantizedPart
from eventlm.models.weights.slices import Ranges, count_of, covering, shifted, spread
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile
from eventlm.models.weights.unpack import UnpackedMatrix, check_values, some_columns
from eventlm.types import OnProgress

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
#: Most bytes of a piece, and the multiple of rows that it has: as many are packed together.
_PIECE_BYTES = 4 << 20
_ROW_MULTIPLE = 32
#: Of the data of each tensor in a buffer.
_ALIGNMENT = 64
#: Of a row: as many are read without the others. Files are read by pages, so that fewer would save little.
_LEAST_BYTES = 256
#: Inputs of a block of what is only unpacked, or more of them.
_LARGEST_BLOCK = 256
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
    """Bytes of a tensor that are read at once, or `num_runs` times as many, which begin `step` apart."""

    path: Path
    stamp: FileStamp
    name: str
    offset: int
    num_bytes: int
    num_runs: int = 1
    step: int = 0

    @property
    def all_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_runs * self.num_bytes


class _Table(NamedTuple):
    """Where rows of a tensor lie.

    columns: the bytes of each row that are wanted of those that are read; empty: all.
    """

    spans: tuple[_Span, ...]
    num_rows: int
    columns: Ranges = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return sum(span.all_bytes for span in self.spans)

    @property
    def room(self) -> int:
        """Bytes of a buffer: data of any dtype may begin where they end."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Part(NamedTuple):
    """Some rows of a weight, from `first_row` on, and where they lie. in_blocks: they stay what they are.

    columns: what is wanted of the numbers of each row that were read; empty: all.
    """

    weight: StoredWeight
    first_row: int
    table: _Table
    in_blocks: bool
    columns: Ranges

    @property
    def tables(self) -> tuple[_Table, ...]:
        """The one that it is."""
        return (self.table,)


class _Whole(NamedTuple):
    """A quantized matrix, and where its parts lie. types: of the weights that are wanted as codes."""

    matrix: QuantizedMatrix
    tables: tuple[_Table, ...]
    types: Mapping[WeightKey, str]


_Unit = _Part | _Whole


def read_pieces(
    files: Sequence[WeightFile],
    on_progress: OnProgress | None = None,
    *,
    in_blocks: Mapping[WeightKey, str] = MappingProxyType({}),
) -> Iterator[Piece]:
    """All weights of the files, in the order of their data. `on_progress` gets the bytes that were read and used.

    in_blocks: matrices that are wanted as codes, and their types (see `packed_types`).

    Raises CheckpointError if a file cannot be read, or is no longer the one that was checked, or if a quantized matrix
    has values that none has.
    """
    units = [unit for file in files for unit in _units(file, in_blocks)]
    sizes = [sum(table.room for table in unit.tables) for unit in units]
    num_bytes, total_bytes = 0, sum(table.num_bytes for unit in units for table in unit.tables)
    buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2)]
    with _Files() as opened, ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        reading = [reader.submit(_read, opened, units[0], buffers[0])] if units else []
        for number, unit in enumerate(units):
            pieces = reading.pop().result()
            if number + 1 < len(units):
                reading.append(reader.submit(_read, opened, units[number + 1], buffers[(number + 1) % 2]))
            yield from pieces
            num_bytes += sum(table.num_bytes for table in unit.tables)
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
                opened.read(_span(part), data[name].numpy())
            check_values(matrix, data)


class _Files(contextlib.ExitStack):
    """The files that are read from. Each must be the one that was checked, at the beginning and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, BufferedReader] = {}

    def read(self, span: _Span, to: np.ndarray) -> None:
        """Fill as many bytes. Raises CheckpointError."""
        if span.path not in self._opened:
            self._opened[span.path] = self.enter_context(_opened(span.path, span.stamp))
        file = self._opened[span.path]
        try:
            if span.num_runs == 1:
                file.seek(span.offset)
                num_read = file.readinto(to.data)
            else:
                number = file.fileno()
                num_read = 0
                for place, run in enumerate(to.reshape(span.num_runs, span.num_bytes)):
                    num_read += os.preadv(number, [run.data], span.offset + place * span.step)
        except OSError as error:
            raise CheckpointError(f"{span.path}: tensor {span.name}: {error.strerror or error}") from error
        if num_read != span.all_bytes:
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
        yield from _parts(file, weight, is_kept=weight.key in in_blocks)
    for matrix in file.quantized:
        types = {key: in_blocks[key] for key in matrix.weights if key in in_blocks}
        yield _Whole(matrix, tuple(_table(part) for part in matrix.parts.values()), types)


def _parts(file: WeightFile, weight: StoredWeight, *, is_kept: bool) -> Iterator[_Part]:
    num_values = math.prod(weight.shape[1:])
    row_bytes = weight.num_bytes // weight.shape[0] or num_values * _DTYPES[weight.dtype].itemsize
    read, columns = range(num_values), weight.columns
    if columns and _is_worth_it(count_of(columns) * row_bytes // num_values):
        read = _hull(columns, _block_inputs(weight), num_values)
        columns = () if count_of(columns) == len(read) else shifted(columns, -read.start)
    begin, end = (place * row_bytes // num_values for place in (read.start, read.stop))
    if is_kept:
        # Bytes of blocks, which are not cut.
        columns = tuple(
            range(*(place * row_bytes // num_values for place in (each.start, each.stop))) for each in columns
        )
    # Other blocks become float32.
    used_bytes = len(read) * torch.float32.itemsize if weight.num_bytes and not is_kept else end - begin
    all_rows = weight.rows or (range(weight.shape[0]),)
    is_whole = len(weight.shape) == 1 or bool(weight.interleaved)
    num_rows = count_of(all_rows)
    step = num_rows if is_whole else _rows_at_once(used_bytes, weight.head_rows or 1)
    tensor = _Span(file.path, file.stamp, weight.name, weight.offset, end - begin, step=row_bytes)
    for first in range(0, num_rows, step):
        rows = _between(all_rows, first, min(first + step, num_rows))
        spans = tuple(_of_rows(tensor, some, begin) for some in rows)
        yield _Part(weight, first, _Table(spans, count_of(rows)), is_kept, columns)


def _between(ranges: Ranges, first: int, last: int) -> Ranges:
    """From the number at place `first` on to the one before `last`, of all one after the other."""
    found, place = [], 0
    for each in ranges:
        start, stop = max(first - place, 0), min(last - place, len(each))
        if start < stop:
            found.append(each[start:stop])
        place += len(each)
    return tuple(found)


def _of_rows(tensor: _Span, rows: range, begin: int) -> _Span:
    """What a tensor has in some rows, `num_bytes` of each from `begin` on."""
    offset = tensor.offset + rows.start * tensor.step + begin
    if tensor.num_bytes == tensor.step:
        return tensor._replace(offset=offset, num_bytes=len(rows) * tensor.step, step=0)
    return tensor._replace(offset=offset, num_runs=len(rows))


def _is_worth_it(num_bytes: int) -> bool:
    """Whether so many bytes of each row are read alone. Each takes a call, which takes as long as to read some more."""
    return num_bytes >= _LEAST_BYTES


def _hull(columns: Ranges, granule: int, count: int) -> range:
    """From the first of them to the last, in whole granules if there are whole ones."""
    if count % granule:
        return range(count)
    return covering((range(columns[0].start, columns[-1].stop),), granule, count)[0]


def _block_inputs(weight: StoredWeight) -> int:
    if not weight.num_bytes:
        return 1
    packed = PACKED_TYPES.get(weight.dtype)
    return packed.block_inputs if packed is not None else _LARGEST_BLOCK


def _table(part: QuantizedPart) -> _Table:
    whole = _span(part)
    if not (part.rows or part.columns):
        return _Table((whole,), 1)
    num_rows, num_columns = part.shape[0], math.prod(part.shape[1:])
    row_bytes = part.num_bytes // num_rows
    item_bytes = row_bytes // num_columns
    columns = spread(part.columns, item_bytes)
    read = range(row_bytes)
    if columns and _is_worth_it(count_of(columns)):
        read = range(columns[0].start, columns[-1].stop)
        columns = () if count_of(columns) == len(read) else shifted(columns, -read.start)
    tensor = whole._replace(num_bytes=len(read), step=row_bytes)
    spans = tuple(_of_rows(tensor, rows, read.start) for rows in part.rows or (range(num_rows),))
    return _Table(spans, count_of(part.rows) or num_rows, columns)


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


def _read(opened: _Files, unit: _Unit, buffer: Tensor) -> Iterator[Piece]:
    """The unit's pieces. Their values may lie in the buffer, which is large enough for its bytes."""
    begin, data = 0, []
    for table in unit.tables:
        place = begin
        for span in table.spans:
            opened.read(span, buffer[place : place + span.all_bytes].numpy())
            place += span.all_bytes
        data.append(_wanted(buffer[begin:place], table))
        begin += table.room
    if isinstance(unit, _Whole):
        matrix = UnpackedMatrix(unit.matrix, dict(zip(unit.matrix.parts, data, strict=True)))
        return _pieces_of_quantized(unit, matrix)
    return _pieces(unit, _values(unit, *data))


def _wanted(data: Tensor, table: _Table) -> Tensor:
    if not table.columns:
        return data
    return some_columns(data.view(table.num_rows, -1), table.columns).contiguous().flatten()


def _values(part: _Part, data: Tensor) -> Tensor:
    weight = part.weight
    if part.in_blocks:
        values = data.view(part.table.num_rows, -1)
    elif weight.num_bytes:
        values = unpack(data.view(part.table.num_rows, -1), weight.dtype)
    else:
        values = data.view(_DTYPES[weight.dtype])
        if len(weight.shape) > 1:
            values = values.view(part.table.num_rows, -1)
    values = some_columns(values, part.columns)
    if weight.head_rows:
        pairs = values.view(-1, weight.head_rows // 2, 2, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    if weight.exponentials:
        if not bool((values < 0).all()):
            path = part.table.spans[0].path
            raise CheckpointError(f"{path}: tensor {weight.name} has numbers that are not negative; download it again")
        values = (-values.float()).log()
    return values.float() + weight.added if weight.added else values
