"""The recorded runs of a folder, each by its header and its last line: however long they are, little is read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from eventlm.bus.run_folder import TRACE_NAME, closed_segments, has_file
from eventlm.bus.segment_reader import MAX_LINE_BYTES, SegmentReader
from eventlm.bus.trace_info import EndState, TraceInfo, info
from eventlm.errors import EventLMError, TraceVersionError, UsageError
from eventlm.events import Header
from eventlm.system.disk import SYSTEM_DISK, Disk

_LAST = re.compile(rb'\{"t":"(\w+)","s":(\d+)(?:,"ts":(\d+))?')
#: Enough for nearly every last line.
_TAIL_BYTES = 16 * 1024

#: Called with the runs read so far and how many there are.
OnRun = Callable[[int, int], None]


class RunSummary(Struct, frozen=True, kw_only=True):
    """What is known of a run; None where it cannot be known, or not without reading all of it.

    run: the folder's name. started_ns: unix time. num_events: from the first that is kept to the last, with those that
    a gap has left out. duration_ns: `ts` of the last line. problem: why the header or a line could not be read; the
    run is `unreadable` then, or of `another_version`. num_requests and num_finished (sequences) only if all was read.
    """

    run: str
    path: str
    num_bytes: int
    num_segments: int
    end: EndState | Literal["unreadable", "another_version"]
    problem: str = ""
    started_ns: int | None = None
    duration_ns: int | None = None
    num_events: int | None = None
    first_s: int | None = None
    header: Header | None = None
    num_requests: int | None = None
    num_rejected: int | None = None
    num_finished: int | None = None


class _Tail(NamedTuple):
    """The last complete line of a file, and whether something follows it."""

    tag: str
    s: int
    ts: int
    is_torn: bool


def list_runs(
    folder: Path, *, full: bool = False, on_run: OnRun | None = None, disk: Disk = SYSTEM_DISK
) -> list[RunSummary]:
    """The runs of a folder, the newest last; of a run's own folder that one. With `full` each is read whole.

    Raises UsageError if the folder cannot be read.
    """
    try:
        names = sorted(disk.list(folder))
    except OSError as error:
        raise UsageError(f"cannot list the runs of {folder}: {error.strerror}") from error
    candidates = [folder] if TRACE_NAME in names else [folder / name for name in names]
    # `latest` is a link to one of the others.
    runs = [run for run in candidates if has_file(run / TRACE_NAME, disk) and (run == folder or not disk.is_link(run))]
    found = []
    for index, run in enumerate(runs):
        # It may have been removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append((_order(disk, run), _summary(disk, run, full=full)))
        if on_run is not None:
            on_run(index + 1, len(runs))
    found.sort(key=lambda item: (item[0] if item[1].started_ns is None else item[1].started_ns, item[1].run))
    return [summary for _, summary in found]


def _order(disk: Disk, run: Path) -> int:
    """Sorts a run whose header cannot be read: when its trace was changed."""
    status = disk.status(run / TRACE_NAME)
    return status.modified_ns if status is not None else 0


def _summary(disk: Disk, run: Path, *, full: bool) -> RunSummary:
    files = [*(segment.path for segment in closed_segments(run, disk)), run / TRACE_NAME]
    statuses = [status for status in map(disk.status, files) if status is not None]
    if len(statuses) < len(files):
        raise FileNotFoundError(run)
    # While a segment is closed, or after a crash then, the last two names are one file.
    if len(files) > 1 and statuses[-1].identity == statuses[-2].identity:
        files.pop(-2)
        statuses.pop(-2)
    summary = RunSummary(
        run=disk.resolve(run).name,
        path=str(run),
        num_bytes=sum(status.num_bytes for status in statuses),
        num_segments=len(files),
        end="unreadable",
    )
    tail = _tail(disk, files[-1])
    if tail is not None:
        summary = structs.replace(summary, duration_ns=tail.ts)
    try:
        with SegmentReader(files[0], disk=disk) as first, SegmentReader(files[-1], disk=disk) as last:
            header, is_written = first.header, last.still_being_written
        summary = _with_header(summary, header, tail, is_written=is_written)
        return _with_counts(summary, info(run if len(files) > 1 else files[0])) if full else summary
    except TraceVersionError as error:
        return structs.replace(summary, end="another_version", problem=str(error))
    except EventLMError as error:
        return structs.replace(summary, end="unreadable", problem=str(error))


def _with_header(summary: RunSummary, header: Header, tail: _Tail | None, *, is_written: bool) -> RunSummary:
    end: EndState = "no_end"
    if is_written:
        end = "still_being_written"
    elif tail is None or tail.is_torn:
        end = "torn"
    elif tail.tag == "end":
        end = "end"
    return structs.replace(
        summary,
        end=end,
        header=header,
        started_ns=int(header.unix_start_ns),
        first_s=header.s,
        num_events=tail.s - header.s + 1 if tail is not None else None,
    )


def _with_counts(summary: RunSummary, found: TraceInfo) -> RunSummary:
    return structs.replace(
        summary,
        end=found.check.end_state,
        num_events=found.check.num_events,
        num_requests=found.num_requests,
        num_rejected=found.num_rejected,
        num_finished=sum(found.finish_reasons.values()),
    )


def last_event_ns(path: Path, disk: Disk = SYSTEM_DISK) -> int | None:
    """When the last event of a trace's file happened, ns since the start of the run; None if no line is complete."""
    tail = _tail(disk, path)
    return None if tail is None else tail.ts


def _tail(disk: Disk, path: Path) -> _Tail | None:
    """The last complete line of a trace's file; None if there is none."""
    with contextlib.closing(disk.open(path)) as file:
        size = file.status().num_bytes
        num_bytes = _TAIL_BYTES
        while True:
            start = max(size - num_bytes, 0)
            file.seek(start)
            content = file.read(size - start)
            end = content.rfind(b"\n")
            begin = content.rfind(b"\n", 0, max(end, 0)) + 1
            if end >= 0 and (begin or not start):
                break
            if not start or num_bytes > MAX_LINE_BYTES:
                return None
            num_bytes *= 16
    head = _LAST.match(content, begin)
    if head is None:
        return None
    return _Tail(head[1].decode(), int(head[2]), int(head[3] or 0), is_torn=end + 1 < len(content))
