"""Reading a trace: one file, or all segments of a run's folder as the one log that they are.

Borders are checked like lines: a segment continues where the one before ended, with its last hash, or has a `gap` after
its header, which names the events between them. A missing segment leaves a hole without a gap, and is damage. If the
oldest are gone, the log begins with the snapshot of the first that is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.bus.segment_reader import LogLine, SegmentReader, TornTail, corrupt
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import Event, Gap, Header
from eventlm.system.disk import SYSTEM_DISK, Disk
from eventlm.types import OnProgress

#: How often a folder is read again if a segment began meanwhile.
_MAX_LISTINGS = 20
_LINES_PER_PROGRESS = 4096

__all__ = ["LogLine", "LogReader", "TornTail", "read_history"]


class SegmentGoneError(UsageError):
    """A segment became too old to be kept while it was about to be read."""


class LogReader:
    """Iterate over the lines of a trace, from the first, as often as wanted (one iteration at a time).

    path: a file, or the folder of a run. header: the first line; size_bytes: of all files, at opening.
    still_being_written: at opening, the writer held its lock. Then a half-written last line is no torn tail.
    num_segments: files; num_lines, position, gaps, torn, clean_end: how far the latest iteration came and how it ended.

    Raises UsageError if there is nothing to read, TraceVersionError for a trace of another version,
    TraceCorruptError for damage (at opening for the first line, else while iterating), and with `strict`
    TornTraceError after the last complete line of a torn trace.
    """

    def __init__(self, path: Path | str, *, strict: bool = False, disk: Disk = SYSTEM_DISK) -> None:
        self.path = str(path)
        self._disk = disk
        self._closed, self._last = _open_all(disk, Path(path), strict=strict)
        self._current = self._last
        self.still_being_written = self._last.still_being_written
        self.num_segments = len(self._closed) + 1
        self.size_bytes = self._last.size_bytes
        try:
            for index in range(len(self._closed)):
                with self._segment(index) as reader:
                    self.size_bytes += reader.size_bytes
            with self._segment(0) as first:
                self.header: Header = first.header
        except BaseException:
            self._last.close()
            raise
        self._reset()

    def _reset(self) -> None:
        self._num_lines_before = 0
        self._num_bytes_before = 0
        self.gaps: list[Gap] = []

    @property
    def num_lines(self) -> int:
        """Lines of the latest iteration."""
        return self._num_lines_before + self._current.num_lines

    @property
    def position(self) -> int:
        """Bytes that the latest iteration has read."""
        return self._num_bytes_before + self._current.position

    @property
    def last_h(self) -> str:
        """The hash of the line that the latest iteration gave last."""
        return self._current.last_h

    @property
    def torn(self) -> TornTail | None:
        """What lies after the last complete line."""
        return self._last.torn

    @property
    def clean_end(self) -> bool:
        """Whether the latest iteration has come to an `end`."""
        return self._last.clean_end

    @property
    def num_missing(self) -> int:
        """Events in the gaps of the latest iteration."""
        return sum(gap.last - gap.first + 1 for gap in self.gaps)

    @contextlib.contextmanager
    def _segment(self, index: int) -> Iterator[SegmentReader]:
        """A reader of a segment, closed after its use; that of the last segment is kept."""
        if index == len(self._closed):
            yield self._last
            return
        path = self._closed[index]
        if self._disk.status(path) is None:
            raise SegmentGoneError(f"{path} was removed while the trace was read; try again")
        with SegmentReader(path, disk=self._disk) as reader:
            yield reader

    def __iter__(self) -> Iterator[LogLine]:
        return self._lines(0, None)

    @property
    def segments(self) -> list[Path]:
        """The files, in their order."""
        return [*self._closed, Path(self._last.path)]

    def lines(self, on_progress: OnProgress | None, *, from_s: int = 0) -> Iterator[LogLine]:
        """The lines from event `from_s` on; `on_progress` gets bytes read, and of how many, now and then
        and at the end."""
        for line in self.lines_from(from_s) if from_s > self.header.s else self:
            yield line
            if on_progress is not None and line.number % _LINES_PER_PROGRESS == 0:
                on_progress(self.position, self.size_bytes)
        if on_progress is not None:
            on_progress(self.size_bytes, self.size_bytes)

    def fold(self, see: Callable[[Event], None], *, on_progress: OnProgress | None = None) -> None:
        """Give all events to `see`, from the first. on_progress: as of `lines`.

        Raises TraceCorruptError where an event contradicts those before it. A trace with right hashes may have been
        made by hand, and what adds events up relies on their order.
        """
        line: LogLine | None = None
        try:
            for line in self.lines(on_progress):
                see(line.event())
        except (ArithmeticError, LookupError, ValueError) as error:
            if line is None:
                raise
            what = f"it contradicts the lines before it ({type(error).__name__}: {error}); `eventlm replay` has more"
            raise corrupt(line.path, line.number, line.byte_offset, what) from error

    def lines_from(self, s: int) -> Iterator[LogLine]:
        """The lines from event `s` on, found by bisection; the lines before it are not checked."""
        index = len(self._closed)
        while index:
            with self._segment(index) as reader:
                if reader.header.s <= s:
                    break
            index -= 1
        return self._lines(index, s)

    def _lines(self, first: int, s: int | None) -> Iterator[LogLine]:
        self._reset()
        before: SegmentReader | None = None
        for index in range(first, self.num_segments):
            with self._segment(index) as reader:
                self._current = reader
                lines = iter(reader) if s is None or before is not None else reader.lines_from(s)
                if before is not None and before.num_lines:
                    self._check_border(before, reader)
                yield from lines
                if index < len(self._closed):
                    self._check_closed(reader)
                    self._num_lines_before += reader.num_lines
                    self._num_bytes_before += reader.position
                before = reader

    def _check_closed(self, reader: SegmentReader) -> None:
        if reader.torn is not None:
            tail = reader.torn
            raise corrupt(
                reader.path, tail.line_number, tail.byte_offset, "the line is cut short, and a segment follows"
            )
        if reader.clean_end:
            raise corrupt(reader.path, reader.num_lines, reader.position, "it has an end record, and a segment follows")

    def _check_border(self, before: SegmentReader, after: SegmentReader) -> None:
        header = after.header
        next_s = before.header.s + before.num_lines
        if header.previous_h != before.last_h and header.s == next_s:
            raise corrupt(after.path, 1, 0, f"it does not follow {before.path}: the hash of its last line is another")
        if header.s == next_s:
            return
        gap = after.declared_gap()
        if gap is not None and (gap.first, gap.last) == (next_s, header.s - 1) and header.previous_h == before.last_h:
            self.gaps.append(gap)
            return
        if header.s > next_s:
            raise TraceCorruptError(
                f"events {next_s} to {header.s - 1} are missing between {before.path} and {after.path}: a segment was "
                "removed or damaged; each of those that are left can be read alone, by its own path"
            )
        raise corrupt(after.path, 1, 0, f"it begins with event {header.s}, but {before.path} ends with {next_s - 1}")

    def warnings(self) -> list[str]:
        """What a user should know of how the trace ends; valid once an iteration has come to its end."""
        return [
            *(
                f"{self.path} has a gap: events {gap.first} to {gap.last} were not recorded ({gap.reason})"
                for gap in self.gaps
            ),
            *self._last.warnings(),
        ]

    def close(self) -> None:
        """Close the files."""
        self._last.close()

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_all(disk: Disk, path: Path, *, strict: bool) -> tuple[list[Path], SegmentReader]:
    """The closed segments, and a reader of the last one; read again if a segment has begun in between."""
    status = disk.status(path)
    if status is None or not status.is_folder:
        return [], SegmentReader(path, strict=strict, disk=disk)
    listed = _list(disk, path)
    for _ in range(_MAX_LISTINGS):
        trace = path / TRACE_NAME
        # The writer died, on a file system without links, between giving the last segment its two names.
        is_there = disk.status(trace) is not None
        last = SegmentReader(trace if is_there or not listed else listed[-1][1], strict=strict, disk=disk)
        before, listed = listed, _list(disk, path)
        if [first_s for first_s, _ in before] == [first_s for first_s, _ in listed]:
            # Between its two names the last segment has both.
            return [segment for first_s, segment in listed if first_s < last.header.s], last
        last.close()
    raise UsageError(f"cannot read the trace {path}: its segments follow each other too fast, give the path of one")


def _list(disk: Disk, folder: Path) -> list[tuple[int, Path]]:
    try:
        return [(segment.first_s, segment.path) for segment in closed_segments(folder, disk)]
    except OSError as error:
        raise UsageError(f"cannot read the trace {folder}: {error.strerror}") from error


def read_history(path: Path | str, first_s: int, last_s: int, *, disk: Disk = SYSTEM_DISK) -> Iterator[Event]:
    """The events of a trace with first_s <= s <= last_s, as far as they are kept: a Bus's `history`."""
    with LogReader(path, disk=disk) as reader, contextlib.suppress(SegmentGoneError):
        for line in reader.lines_from(first_s):
            if line.s > last_s:
                return
            yield line.event()
