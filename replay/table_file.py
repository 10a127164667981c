"""Tables in files, as CSV or parquet, row by row."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

from eventlm.errors import UsageError

Format = Literal["csv", "parquet"]
Value = int | str | None
#: Rows that are held until they are written.
BATCH_ROWS = 16 * 1024


class Exported(NamedTuple):
    """A file that was written, and its rows."""

    path: str
    num_rows: int


class TableWriter(Protocol):
    """Takes rows in batches, each with a value for every column."""

    def write(self, rows: list[tuple[Value, ...]]) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class CsvWriter:
    """Nothing is an empty cell."""

    def __init__(self, file: IO[bytes], columns: dict[str, type]) -> None:
        self._text = os.fdopen(os.dup(file.fileno()), "w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._text, lineterminator="\n")
        self._csv.writerow(columns)

    def write(self, rows: list[tuple[Value, ...]]) -> None:
        """Append rows."""
        self._csv.writerows(rows)

    def close(self) -> None:
        """Flush what is buffered."""
        self._text.close()


class ParquetWriter:
    """Integers are int64 and may be null. Raises UsageError without pyarrow."""

    def __init__(self, file: IO[bytes], columns: dict[str, type]) -> None:
        require_pyarrow()
        import pyarrow
        import pyarrow.parquet

        self._pyarrow = pyarrow
        self._schema = pyarrow.schema(
            [(name, pyarrow.string() if kind is str else pyarrow.int64()) for name, kind in columns.items()]
        )
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: list[tuple[Value, ...]]) -> None:
        """Append rows."""
        arrays = [
            self._pyarrow.array(values, type=field.type)
            for values, field in zip(zip(*rows, strict=True), self._schema, strict=True)
        ]
        self._writer.write_table(self._pyarrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


WRITERS: dict[Format, Callable[[IO[bytes], dict[str, type]], TableWriter]] = {
    "csv": CsvWriter,
    "parquet": ParquetWriter,
}


def require_pyarrow() -> None:
    """Raises UsageError that says what to install."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "parquet files need pyarrow, which is not installed: `pip install 'eventlm[parquet]'`, or use --to csv"
        ) from error


class TableFile:
    """Rows on their way to a file of its own, which takes its name when it is whole."""

    def __init__(self, path: Path, columns: dict[str, type], to: Format) -> None:
        self.path = path
        self.num_rows = 0
        self._partial = path.with_name(f".{path.name}.partial")
        self._columns = columns
        self._rows: list[tuple[Value, ...]] = []
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._writer = WRITERS[to](self._file, columns)

    def add(self, values: dict[str, Value]) -> None:
        """Append a row; columns that are not given are empty."""
        self._rows.append(tuple(map(values.get, self._columns)))
        self.num_rows += 1
        if len(self._rows) == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write(self._rows)
        self._rows = []

    def finish(self) -> Exported:
        """Write what is left and put the file in its place."""
        self._flush()
        self._writer.close()
        self._file.close()
        self._partial.replace(self.path)
        return Exported(str(self.path), self.num_rows)

    def give_up(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
            self._file.close()
        self._partial.unlink(missing_ok=True)
