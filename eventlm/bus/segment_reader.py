"""Reading a file of a trace: line by line, in bounded memory, each line checked against the chain before it is used.

A trace is whole (it ends in `end`), without a clean end (its writer died between two lines), torn (its
writer died within a line) or still being written (its writer holds the lock). All four can be read. A
complete line that does not fit the chain is damage, and damage is refused with line and byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from eventlm._version import __version__
from eventlm.bus.run_folder import is_closed_name
from eventlm.errors import TornTraceError, TraceCorruptError, TraceVersionError, UsageError
from eventlm.events import Event, Gap, Header
from eventlm.events.codec import SUFFIX_BYTES, UNREADABLE, chain, close_line, decode_body, split_line
from eventlm.events.header_check import MAX_HEADER_BYTES, decode_header
from eventlm.events.markers import BEHAVIOUR_VERSION, FORMAT_VERSION, SCHEMA_VERSION
from eventlm.system.disk import SYSTEM_DISK, Disk

#: No event comes near it, nor does the snapshot of an engine that fits a machine. It bounds the memory that a file
#: without newlines can take.
MAX_LINE_BYTES = 256 * 1024 * 1024
#: Below this many bytes a search goes on line by line.
_SEARCH_BYTES = 64 * 1024
_HEAD_BYTES = 128
_FIRST_LINE_BYTES = MAX_HEADER_BYTES + SUFFIX_BYTES + 1
_HEADER_START = b'{"t":"header",'
_HEAD = re.compile(rb'\{"t":"(\w+)","s":(\d+)')


class TornTail(Struct, frozen=True):
    """What lies after the last complete line: where it would have begun, and how many bytes of it there
    are."""

    line_number: int
    byte_offset: int
    num_bytes: int


class LogLine(Struct, frozen=True, gc=False):
    """A line whose hash and position are right. Line numbers count from 1, byte offsets from 0."""

    path: str
    number: int
    byte_offset: int
    tag: str
    s: int
    body: bytes

    def event(self) -> Event:
        """The event. Raises TraceCorruptError where the line, although it was written so, is not an event."""
        try:
            return decode_body(self.body)
        except UNREADABLE as error:
            what = f"it is not an event: {error}"
            raise corrupt(self.path, self.number, self.byte_offset, what) from error


class _HeaderStart(Struct):
    """The part of a header that every version of it has."""

    format: int = 0
    schema: int = 0
    behaviour: int = 0
    code_version: str = ""
    previous_h: str = ""
    s: int = 0


def corrupt(path: str, line_number: int, byte_offset: int, what: str) -> TraceCorruptError:
    """Damage and where it is."""
    return TraceCorruptError(f"{path} is damaged at line {line_number}, byte {byte_offset}: {what}")


class SegmentReader:
    """Iterate over the lines of one file, from the first, as often as wanted (one iteration at a time).

    header: the first line.
    still_being_written: at opening, the writer held its lock. Then a half-written last line is no torn tail.
    size_bytes, position: the file's size at opening, and how much of it was read; lines added later are left.
    num_lines, last_h, torn, clean_end: how far the latest iteration came, the hash of its last line, and how it ended.

    Raises UsageError if there is nothing to read, TraceVersionError for a trace of another version,
    TraceCorruptError for damage (at opening for the first line, else while iterating), and with `strict`
    TornTraceError after the last complete line of a torn trace.
    """

    def __init__(self, path: Path | str, *, strict: bool = False, disk: Disk = SYSTEM_DISK) -> None:
        self.path = str(path)
        self._strict = strict
        try:
            self._file = disk.open(Path(path))
        except OSError as error:
            raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
        try:
            # Probed before the size is taken: once the lock is free, no process writes to the file any more.
            self.still_being_written = self._file.is_locked()
            status = self._file.status()
            if not status.is_file:
                raise UsageError(f"cannot read the trace {path}: it is not a regular file")
            self.size_bytes = status.num_bytes
            self._reset()
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _reset(self) -> None:
        self.position = 0
        self.num_lines = 0
        self.last_h = ""
        self.torn: TornTail | None = None
        self.clean_end = False

    def _read_header(self) -> Header:
        line = self._file.readline(_FIRST_LINE_BYTES)
        has_start = line.startswith(_HEADER_START)
        if not has_start and line and split_line(line[:-1]) is None and not _HEADER_START.startswith(line):
            raise UsageError(f"{self.path} is not a trace: its first line is no header")
        if not line.endswith(b"\n"):
            if self.still_being_written:
                raise UsageError(f"{self.path} has no header yet: the run has only begun, try again")
            if len(line) == _FIRST_LINE_BYTES:
                raise corrupt(self.path, 1, 0, f"no header is longer than {MAX_HEADER_BYTES:,} bytes")
            raise corrupt(self.path, 1, 0, "it has no complete header; nothing of it can be used")
        body = line[: -SUFFIX_BYTES - 1]
        if split_line(line[:-1]) is None or not has_start:
            raise corrupt(self.path, 1, 0, "its first line is not the header of a trace")
        try:
            start = msgspec.json.decode(body + b"}", type=_HeaderStart)
        except UNREADABLE as error:
            raise corrupt(self.path, 1, 0, f"its header cannot be read: {error}") from error
        if close_line(body, chain(start.previous_h, body)) != line:
            raise corrupt(self.path, 1, 0, "the hash of its header does not match")
        self._check_versions(start)
        try:
            return decode_header(body)
        except ValueError as error:
            what = f"no engine has such a header: {error}; take another copy of the trace"
            raise corrupt(self.path, 1, 0, what) from error

    def _check_versions(self, found: _HeaderStart) -> None:
        known = (FORMAT_VERSION, SCHEMA_VERSION, BEHAVIOUR_VERSION)
        if (found.format, found.schema, found.behaviour) == known:
            return
        raise TraceVersionError(
            f"{self.path} has format {found.format}, schema {found.schema}, behaviour {found.behaviour} "
            f"and was written by eventlm {found.code_version or 'of an unknown version'}; this is eventlm "
            f"{__version__}, which reads format {FORMAT_VERSION}, schema {SCHEMA_VERSION}, behaviour "
            f"{BEHAVIOUR_VERSION}: read it with the version that wrote it"
        )

    def __iter__(self) -> Iterator[LogLine]:
        return self._lines(0, 1, self.header.s, self.header.previous_h)

    def declared_gap(self) -> Gap | None:
        """The second line if it is a gap: the events missing before the first. Ends any iteration."""
        for line in self:
            if line.number == 2:
                event = line.event()
                return event if isinstance(event, Gap) else None
        return None

    def lines_from(self, s: int) -> Iterator[LogLine]:
        """The lines from event `s` on, found by bisection; the lines before it are not checked."""
        before = self._find(s - 1) if s > self.header.s else None
        if before is None:
            return (line for line in self if line.s >= s)
        byte_offset, h = before
        return self._lines(byte_offset, s - self.header.s + 1, s, h)

    def _lines(self, byte_offset: int, line_number: int, s: int, previous_h: str) -> Iterator[LogLine]:
        """The lines from a position on, given what is expected there: line number, `s`, and the hash before."""
        self._reset()
        self._file.seek(byte_offset)
        readline, match_head = self._file.readline, _HEAD.match
        path, size_bytes, tag = self.path, self.size_bytes, ""
        while byte_offset < size_bytes:
            line = readline(MAX_LINE_BYTES)
            if line[-1:] != b"\n":
                self._end_torn(line_number, byte_offset, len(line), after_end=tag == "end")
                break
            body = line[: -SUFFIX_BYTES - 1]
            h = chain(previous_h, body)
            head = match_head(body)
            if close_line(body, h) != line or head is None or int(head[2]) != s or tag == "end":
                self._refuse(line, line_number, byte_offset, s, h, after_end=tag == "end")
            tag = head[1].decode()
            yield_offset = byte_offset
            byte_offset += len(line)
            self.position, self.num_lines, self.last_h = byte_offset, line_number, h
            yield LogLine(path, line_number, yield_offset, tag, s, body)
            previous_h = h
            line_number += 1
            s += 1
        self.clean_end = tag == "end"

    def _end_torn(self, line_number: int, byte_offset: int, num_bytes: int, *, after_end: bool) -> None:
        if after_end:
            raise corrupt(self.path, line_number, byte_offset, f"{num_bytes} bytes follow the end record")
        if num_bytes == MAX_LINE_BYTES:
            what = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise corrupt(self.path, line_number, byte_offset, what)
        if self.still_being_written:
            return
        num_bytes = self.size_bytes - byte_offset
        self.torn = TornTail(line_number, byte_offset, num_bytes)
        if self._strict:
            raise TornTraceError(
                f"{self.path} is torn at line {line_number}, byte {byte_offset}: {num_bytes} bytes of "
                f"an incomplete line; `eventlm trace repair {self.path}` removes them"
            )

    def _refuse(self, line: bytes, line_number: int, byte_offset: int, s: int, h: str, *, after_end: bool) -> NoReturn:
        """Say what is wrong with a complete line that cannot stand here; h is the hash that fits."""
        split, head = split_line(line[:-1]), _HEAD.match(line)
        found_s = int(head[2]) if head else s
        if after_end:
            what = "it follows the end record"
        elif split is None:
            what = 'it does not end in its hash (,"h":"<16 hex>"})'
        elif head is None:
            what = 'it does not begin as an event does ({"t":"<tag>","s":<number>)'
        elif found_s != s:
            what = self._describe_jump(s, found_s)
        elif not _is_json(split.body + b"}"):
            what = f"it is not JSON, and its hash ({split.claimed_h}) is not that of its content ({h})"
        else:
            what = f"its hash does not match: it says {split.claimed_h}, its content gives {h}"
        raise corrupt(self.path, line_number, byte_offset, what)

    def _describe_jump(self, s: int, found_s: int) -> str:
        head = _HEAD.match(self._file.readline(_HEAD_BYTES))
        following_s = int(head[2]) if head else -1
        if (found_s, following_s) == (s + 1, s):
            return f"events {s} and {found_s} have changed places"
        if found_s > s and following_s == found_s + 1:
            missing = f"event {s} is" if found_s == s + 1 else f"events {s} to {found_s - 1} are"
            return f"{missing} missing, event {found_s} follows event {s - 1}"
        return f"event {found_s} stands where event {s} belongs"

    def _find(self, s: int) -> tuple[int, str] | None:
        """Where the line of event `s` ends and the hash it claims; None if the search meets damage."""
        low, high = 0, self.size_bytes
        while high - low > _SEARCH_BYTES:
            middle = (low + high) // 2
            self._file.seek(middle)
            start = middle + len(self._file.readline(MAX_LINE_BYTES))
            head = _HEAD.match(self._file.readline(_HEAD_BYTES)) if start < high else None
            if head is not None and int(head[2]) <= s:
                low = start
            else:
                high = middle
        self._file.seek(low)
        while low < self.size_bytes:
            line = self._file.readline(MAX_LINE_BYTES)
            if line[-1:] != b"\n":
                break
            low += len(line)
            head, split = _HEAD.match(line), split_line(line[:-1])
            if head is None or split is None or int(head[2]) > s:
                return None
            if int(head[2]) == s:
                return low, split.claimed_h
        return self.size_bytes, ""

    def warnings(self) -> list[str]:
        """What a user should know of how the trace ends; valid once an iteration has come to its end."""
        if self.still_being_written:
            return [f"{self.path} is still being written: its {self.num_lines:,} complete lines were used"]
        if self.torn is not None:
            return [
                f"{self.path} is torn: {self.torn.num_bytes} bytes at line {self.torn.line_number}, byte "
                f"{self.torn.byte_offset} were left out; `eventlm trace repair {self.path}` removes them"
            ]
        if not self.clean_end and not is_closed_name(Path(self.path).name):
            last_s = self.header.s + self.num_lines - 1
            return [f"{self.path} has no clean end: its engine was killed or replaced after event {last_s}"]
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except UNREADABLE:
        return False
    return True
