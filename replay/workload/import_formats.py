"""Public traces of real load, row by row, in the terms of their own formats.

Times become integer nanoseconds without a detour through floats. Columns are found by name, because files of one format
differ in which columns they have and in what order.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TextIO

import msgspec
from msgspec import Meta, Struct

from eventlm.errors import UsageError
from eventlm.replay.workload.request_line import Name
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

SourceName = Literal["azure", "burstgpt", "mooncake", "bailian", "vidur"]

#: Far above any count of tokens or time in seconds.
_MAX_NUMBER = 10**12
_WALL_CLOCK = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:Z|([+-])(\d\d):?(\d\d))?")


class SourceRow(Struct, kw_only=True, gc=False):
    """A request of a public trace. arrived_ns: from the source's own origin. blocks: of the prompt; the last may be
    partial. key, parent_key: its name, and that of the request that it continues. session_key: common to the turns of
    a session. elapsed_ns: until its answer was complete. Empty or None: unknown.
    """

    arrived_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: list[int] = []
    key: str = ""
    parent_key: str = ""
    session_key: str = ""
    elapsed_ns: int | None = None
    service_class: str = ""


class Source(NamedTuple):
    """A format: required columns, how to read it, and the size of its blocks in tokens (0: none)."""

    columns: tuple[str, ...]
    read: Callable[[str, TextIO], Iterator[SourceRow]]
    block_size: int = 0
    #: From its prompts' blocks; the source does not name sessions.
    infers_sessions: bool = False


class _CsvRow(NamedTuple):
    """A row by column. line: file and line number, for errors."""

    line: str
    values: Mapping[str, str]

    def tokens(self, column: str) -> int:
        text = self.values[column].strip()
        if text.isdecimal() and len(text) <= 12:
            return int(text)
        value = _exactly(f"{self.line}: {column}", text, 1_000)
        if value % 1_000:
            raise UsageError(f"{self.line}: {column}: {text!r} is not a whole number")
        return value // 1_000

    def seconds(self, column: str) -> int:
        """A time in seconds, as nanoseconds."""
        return _exactly(f"{self.line}: {column}", self.values[column].strip(), NANOSECONDS_PER_SECOND)


def _csv_rows(name: SourceName, path: str, file: TextIO) -> Iterator[_CsvRow]:
    """Names of columns are compared without case and outer blanks."""
    reader = csv.reader(file, skipinitialspace=True)
    try:
        columns = [column.strip() for column in next(filter(None, reader), [])]
        known = {column.lower(): column for column in SOURCES[name].columns} | _MORE_COLUMNS
        named = [known.get(column.lower(), column) for column in columns]
        _check_columns(name, path, columns)
        twice = next((column for column in known.values() if named.count(column) > 1), None)
        if twice is not None:
            raise UsageError(f"{path}:{reader.line_num}: {named.count(twice)} columns are called {twice}")
        for values in reader:
            if not values:
                continue
            if len(values) != len(named):
                raise UsageError(f"{path}:{reader.line_num}: {len(values)} values for {len(named)} columns")
            yield _CsvRow(f"{path}:{reader.line_num}", dict(zip(named, values, strict=True)))
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: it is not CSV: {error}") from error


def _check_columns(name: SourceName, path: str, found: list[str]) -> None:
    """Raises UsageError unless this format fits, and no other with more columns does."""
    lowered = {column.lower() for column in found}
    fitting = [other for other, source in SOURCES.items() if {c.lower() for c in source.columns} <= lowered]
    best = max(fitting, key=lambda other: len(SOURCES[other].columns), default=None)
    if best == name:
        return
    needed = ", ".join(SOURCES[name].columns)
    hint = f"; they are those of {best}: --from {best}" if best is not None else ""
    has = ", ".join(column[:40] for column in found[:12]) or "none"
    raise UsageError(f"{path} has the columns {has}, a trace of {name} needs {needed}{hint}")


def _azure(path: str, file: TextIO) -> Iterator[SourceRow]:
    for row in _csv_rows("azure", path, file):
        text = row.values["TIMESTAMP"]
        try:
            arrived_ns = _wall_clock_ns(text)
        except ValueError as error:
            raise UsageError(f"{row.line}: TIMESTAMP: {text!r} is not a time: {error}") from error
        yield SourceRow(
            arrived_ns=arrived_ns,
            prompt_tokens=row.tokens("ContextTokens"),
            output_tokens=row.tokens("GeneratedTokens"),
        )


def _burstgpt(path: str, file: TextIO) -> Iterator[SourceRow]:
    for row in _csv_rows("burstgpt", path, file):
        yield SourceRow(
            arrived_ns=row.seconds("Timestamp"),
            prompt_tokens=row.tokens("Request tokens"),
            output_tokens=row.tokens("Response tokens"),
            session_key=_key(row.values.get("Session ID", "")),
            elapsed_ns=row.seconds("Elapsed time") if _key(row.values.get("Elapsed time", "")) else None,
            service_class=row.values.get("Log Type", "").strip(),
        )


def _vidur(path: str, file: TextIO) -> Iterator[SourceRow]:
    for row in _csv_rows("vidur", path, file):
        yield SourceRow(
            arrived_ns=row.seconds("arrived_at"),
            prompt_tokens=row.tokens("num_prefill_tokens"),
            output_tokens=row.tokens("num_decode_tokens"),
        )


_Count = Annotated[int, Meta(ge=0, lt=_MAX_NUMBER)]


class _MooncakeLine(Struct, gc=False):
    timestamp: Decimal
    input_length: _Count
    output_length: _Count
    hash_ids: list[Name]


class _BailianLine(Struct, gc=False):
    chat_id: int | str
    parent_chat_id: int | str
    timestamp: Decimal
    input_length: _Count
    output_length: _Count
    hash_ids: list[Name]
    type: str = ""


def _mooncake(path: str, file: TextIO) -> Iterator[SourceRow]:
    for where, line in _json_lines("mooncake", path, file, msgspec.json.Decoder(_MooncakeLine)):
        yield SourceRow(
            arrived_ns=_exactly(f"{where}: timestamp", line.timestamp, NANOSECONDS_PER_MILLISECOND),
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=line.hash_ids,
        )


def _bailian(path: str, file: TextIO) -> Iterator[SourceRow]:
    for where, line in _json_lines("bailian", path, file, msgspec.json.Decoder(_BailianLine)):
        yield SourceRow(
            arrived_ns=_exactly(f"{where}: timestamp", line.timestamp, NANOSECONDS_PER_SECOND),
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=line.hash_ids,
            key=_key(str(line.chat_id)),
            parent_key=_key(str(line.parent_chat_id)),
            service_class=line.type,
        )


def _json_lines(
    name: SourceName, path: str, file: TextIO, decoder: msgspec.json.Decoder[Any]
) -> Iterator[tuple[str, Any]]:
    """Decoded lines, each with file and line number."""
    is_first = True
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            if is_first:
                is_first = False
                _check_columns(name, path, _columns_of(text))
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        yield f"{path}:{number}", line


def _columns_of(text: str) -> list[str]:
    """The fields of a JSON object, else possible columns of a CSV file. Raises msgspec.DecodeError."""
    if text.lstrip().startswith("{"):
        return list(msgspec.json.decode(text, type=dict[str, Any]))
    return [column.strip() for column in text.split(",")]


SOURCES: dict[SourceName, Source] = {
    "azure": Source(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    "burstgpt": Source(("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
    "mooncake": Source(
        ("timestamp", "input_length", "output_length", "hash_ids"), _mooncake, block_size=512, infers_sessions=True
    ),
    "bailian": Source(
        ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"), _bailian, block_size=16
    ),
    "vidur": Source(("arrived_at", "num_prefill_tokens", "num_decode_tokens"), _vidur),
}
#: Columns that only some files have.
_MORE_COLUMNS = {column.lower(): column for column in ("Session ID", "Elapsed time", "Log Type")}


def _key(text: str) -> str:
    """A name; empty for the values that mean none."""
    text = text.strip()
    return "" if text.lower() in ("", "-1", "nan", "none", "null") else text


def _exactly(where: str, value: str | Decimal, unit: int) -> int:
    """A decimal number in integer units, rounded down."""
    try:
        decimal = Decimal(value)
        if not 0 <= decimal < _MAX_NUMBER:
            raise UsageError(f"{where}: {value} is out of range")
        return int(decimal * unit)
    except InvalidOperation as error:
        raise UsageError(f"{where}: {value!r} is not a number") from error


def _wall_clock_ns(text: str) -> int:
    """Nanoseconds since the year 1, in UTC if the text names a zone. Raises ValueError."""
    match = _WALL_CLOCK.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected YYYY-MM-DD hh:mm:ss and a fraction")
    year, month, day, hours, minutes, seconds = map(int, match.groups()[:6])
    if hours > 23 or minutes > 59 or seconds > 60:
        raise ValueError("there is no such hour")
    fraction, sign, zone_hours, zone_minutes = match.groups()[6:]
    whole = _days(year, month, day) * 86_400 + hours * 3_600 + minutes * 60 + seconds
    if sign:
        offset = int(zone_hours) * 3_600 + int(zone_minutes) * 60
        whole -= offset if sign == "+" else -offset
    return whole * NANOSECONDS_PER_SECOND + int((fraction or "0")[:9].ljust(9, "0"))


@lru_cache(maxsize=256)
def _days(year: int, month: int, day: int) -> int:
    return date(year, month, day).toordinal()
