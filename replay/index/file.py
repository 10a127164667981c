"""The file of an index: a line of JSON that says what follows, then compressed columns and snapshots.

A column is stored as its differences or as it is, in the narrowest integers that hold it, compressed by zlib. Columns
are read when they are first asked for.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from eventlm.replay.index.indexer import CoreSnapshot
from eventlm.replay.index.tables import SCHEMAS, Column, Schema, Table

FORMAT_VERSION = 5
_COMPRESSION_LEVEL = 1
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_WIDTHS = tuple(map(np.dtype, (np.int8, np.int16, np.int32, np.int64)))
_Size = Annotated[int, Meta(ge=0)]


class IndexFacts(Struct, frozen=True, kw_only=True):
    """What an index says of itself.

    next_s: the event after the last one that it covers. last_ns, last_h: the time and the hash of that one.
    num_bytes: of the log that was read. is_verified: made by a replay; else `missing` says what it lacks, and why.
    is_ended: the run has ended. damage: of the log after what is covered. warnings: on the log.
    """

    first_s: int
    next_s: int
    last_ns: int
    last_h: str
    num_bytes: int
    is_verified: bool
    is_ended: bool = True
    missing: str = ""
    damage: str = ""
    warnings: list[str] = []


class _StoredColumn(Struct, frozen=True, array_like=True):
    offset: _Size
    num_bytes: _Size
    width: Annotated[int, Meta(ge=0, le=3)]
    is_difference: bool


class _StoredSnapshot(Struct, frozen=True, array_like=True):
    next_s: int
    ts: int
    offset: _Size
    num_bytes: _Size


class _FileHeader(Struct, frozen=True, kw_only=True, tag="index", tag_field="t"):
    format: int
    facts: IndexFacts
    names: list[str]
    rows: dict[str, _Size]
    columns: dict[str, list[_StoredColumn]]
    snapshots: list[_StoredSnapshot]


class IndexContent(Struct, frozen=True, kw_only=True):
    """All that an index holds."""

    facts: IndexFacts
    names: list[str]
    tables: dict[str, Table]
    snapshots: Sequence[CoreSnapshot]


class BrokenIndexError(ValueError):
    """A file is not an index of this version, or is damaged."""


def write_index(path: Path, content: IndexContent) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    parts: list[bytes] = []
    offset = 0

    def put(part: bytes) -> tuple[int, int]:
        nonlocal offset
        parts.append(part)
        offset += len(part)
        return offset - len(part), len(part)

    columns: dict[str, list[_StoredColumn]] = {}
    for name, table in content.tables.items():
        columns[name] = []
        for column in table.schema.columns:
            packed, width, is_difference = _pack(table[column])
            columns[name].append(_StoredColumn(*put(packed), width, is_difference))
    header = _FileHeader(
        format=FORMAT_VERSION,
        facts=content.facts,
        names=content.names,
        rows={name: len(table) for name, table in content.tables.items()},
        columns=columns,
        snapshots=[_StoredSnapshot(each.next_s, each.ts, *put(each.compressed)) for each in content.snapshots],
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Mode 0600 from the start, and a name that no other process has: two commands may index one run at once.
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(header) + b"\n")
            file.writelines(parts)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read_index(path: Path) -> IndexContent:
    """Read a file. Raises OSError, and BrokenIndexError for one that is not a whole index of this version."""
    with path.open("rb") as file:
        line = file.readline(_MAX_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    try:
        header = msgspec.json.decode(line, type=_FileHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokenIndexError(f"{path} is not an index: {error}") from error
    if header.format != FORMAT_VERSION:
        raise BrokenIndexError(f"{path} has format {header.format}, this version reads {FORMAT_VERSION}")
    stored = [column for columns in header.columns.values() for column in columns]
    ends = [each.offset + each.num_bytes for each in stored] + [
        each.offset + each.num_bytes for each in header.snapshots
    ]
    if len(line) + max(ends, default=0) != size:
        raise BrokenIndexError(f"{path} is cut short")
    if any(len(header.columns.get(schema.name, [])) != len(schema.columns) for schema in SCHEMAS):
        raise BrokenIndexError(f"{path} has other columns")
    reader = _Parts(path, len(line))
    tables: dict[str, Table] = {
        schema.name: _StoredTable(schema, header.rows[schema.name], header.columns[schema.name], reader)
        for schema in SCHEMAS
    }
    return IndexContent(
        facts=header.facts, names=header.names, tables=tables, snapshots=_Snapshots(header.snapshots, reader)
    )


class _Parts:
    """Reads parts of the file, which may have been replaced or removed meanwhile: it stays open."""

    def __init__(self, path: Path, start: int) -> None:
        self._file = path.open("rb")
        self._start = start

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), num_bytes, self._start + offset)


class _StoredTable(Table):
    """A table whose columns are read when they are asked for."""

    def __init__(self, schema: Schema, num_rows: int, stored: list[_StoredColumn], parts: _Parts) -> None:
        super().__init__(schema, {})
        self._num_rows = num_rows
        self._stored = dict(zip(schema.columns, stored, strict=True))
        self._parts = parts

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, column: str) -> Column:
        found = self._columns.get(column)
        if found is None:
            stored = self._stored[column]
            packed = self._parts.read(stored.offset, stored.num_bytes)
            found = self._columns[column] = _unpack(packed, stored.width, is_difference=stored.is_difference)
            if len(found) != self._num_rows:
                raise BrokenIndexError(f"column {column} of {self.schema.name} is damaged")
        return found


class _Snapshots(Sequence[CoreSnapshot]):
    """The snapshots of a file, each read when it is asked for."""

    def __init__(self, stored: list[_StoredSnapshot], parts: _Parts) -> None:
        self._stored = stored
        self._parts = parts

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, position: int) -> CoreSnapshot:  # type: ignore[override]
        stored = self._stored[position]
        return CoreSnapshot(stored.next_s, stored.ts, self._parts.read(stored.offset, stored.num_bytes))


def _pack(column: Column) -> tuple[bytes, int, bool]:
    """The packed column, the width of its integers, and whether they are differences."""
    differences = np.diff(column, prepend=np.int64(0))
    is_difference = len(column) > 0 and _width(differences) <= _width(column)
    values = differences if is_difference else column
    width = _width(values)
    return zlib.compress(values.astype(_WIDTHS[width]).tobytes(), _COMPRESSION_LEVEL), width, is_difference


def _width(values: Column) -> int:
    if not len(values):
        return 0
    low, high = int(values.min()), int(values.max())
    return next(
        number
        for number, kind in enumerate(_WIDTHS)
        if -(1 << 8 * kind.itemsize - 1) <= low and high < 1 << 8 * kind.itemsize - 1
    )


def _unpack(packed: bytes, width: int, *, is_difference: bool) -> Column:
    try:
        values = np.frombuffer(zlib.decompress(packed), _WIDTHS[width]).astype(np.int64)
    except (zlib.error, ValueError) as error:
        raise BrokenIndexError(f"a column is damaged: {error}") from error
    return np.cumsum(values) if is_difference else values
