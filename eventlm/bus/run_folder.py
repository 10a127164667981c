"""The folder of a run: its segments by name, which of them is the newest, and what may be removed.

    DIR/latest -> <run>                   the newest run
    DIR/<run>/trace-000000000000.jsonl    closed segments, named by the `s` of their header
    DIR/<run>/trace.jsonl                 the last one, locked (flock) while the run goes on
    DIR/<run>/tokens*.jsonl               the token log of each of these, where one is written (`eventlm.bus.token_log`)

A segment is closed by a second name (link) for the last one, and the next one then takes the name `trace.jsonl`
(rename). So `trace.jsonl` is always there, and a process that dies in between leaves one segment with two names.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from eventlm.system.disk import SYSTEM_DISK, Disk

TRACE_NAME = "trace.jsonl"
#: A segment that is not complete enough to be read.
NEXT_NAME = "trace.jsonl.next"
LATEST_NAME = "latest"
TOKENS_NAME = "tokens.jsonl"
NEXT_TOKENS_NAME = "tokens.jsonl.next"

_CLOSED = re.compile(r"trace-(\d{12,})\.jsonl")
_TOKENS = re.compile(r"tokens.*\.jsonl")
#: As the engine names its runs, so that nothing else in a folder is ever removed.
_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


class Segment(NamedTuple):
    """A file of a run, to be ordered by run and position."""

    run: str
    first_s: int
    path: Path


def closed_name(first_s: int) -> str:
    """The name of a closed segment whose header is event `first_s`."""
    return f"trace-{first_s:012}.jsonl"


def tokens_name(trace_name: str) -> str:
    """The name of the token log of a segment."""
    return trace_name.replace("trace", "tokens", 1)


def is_closed_name(name: str) -> bool:
    """Whether a file of this name is a closed segment: another follows it."""
    return _CLOSED.fullmatch(name) is not None


def lasting_path(path: str, disk: Disk = SYSTEM_DISK) -> str:
    """The path of a trace under a name that stays its own: `latest` is another run tomorrow, and the last file of a run
    gets another name once the next one begins.
    """
    found = Path(path)
    if found.name == TRACE_NAME and found.parent != Path():
        found = found.parent
    if found.name == LATEST_NAME and disk.status(found) is not None:
        found = found.with_name(disk.resolve(found).name)
    return str(found)


def closed_segments(run_folder: Path, disk: Disk = SYSTEM_DISK) -> list[Segment]:
    """All but the last segment, in their order. Raises OSError if the folder cannot be read."""
    matches = map(_CLOSED.fullmatch, disk.list(run_folder))
    found = [Segment(run_folder.name, int(m[1]), run_folder / m[0]) for m in matches if m]
    return sorted(found)


def newest_run(folder: Path, disk: Disk = SYSTEM_DISK) -> Path | None:
    """The folder of the newest run: what `latest` points to, else the last by name; None if there is none."""
    found = [folder / LATEST_NAME, *runs(folder, disk)]
    return next((run for run in found if has_file(run / TRACE_NAME, disk)), None)


def newest_running(folder: Path, disk: Disk = SYSTEM_DISK) -> Path | None:
    """The folder of the newest run that a writer has open; None if there is none."""
    for run in runs(folder, disk):
        with contextlib.suppress(OSError):
            if is_being_written(run / TRACE_NAME, disk):
                return run
    return None


def runs(folder: Path, disk: Disk) -> list[Path]:
    """The folders of all runs, the newest first; none if the folder cannot be read."""
    with contextlib.suppress(OSError):
        return [folder / name for name in sorted(filter(_RUN.fullmatch, disk.list(folder)), reverse=True)]
    return []


def has_file(path: Path, disk: Disk) -> bool:
    """Whether there is a regular file of this name."""
    status = disk.status(path)
    return status is not None and status.is_file


def is_being_written(trace: Path, disk: Disk = SYSTEM_DISK) -> bool:
    """Whether a writer holds the lock of the file of this name. Raises OSError if it cannot be opened."""
    with contextlib.closing(disk.open(trace)) as file:
        if file.is_locked():
            return True
        # Another file may have taken the name since this one was opened: then a segment has begun.
        named = disk.status(trace)
        return named is not None and named.identity != file.status().identity


def prune(disk: Disk, run_folder: Path, *, keep_bytes: int, all_runs: bool) -> None:
    """Remove the oldest closed segments until the run has at most `keep_bytes`; its last one always stays.

    With `all_runs` the limit is for all runs of the folder that are not being written, and this one: older runs go
    first. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        removable = closed_segments(run_folder, disk)
        if all_runs:
            removable = sorted([*removable, *_ended_runs(disk, run_folder)])
        paths = [run_folder / TRACE_NAME, *(segment.path for segment in removable)]
        total = sum(_segment_size(disk, path) for path in paths)
        for segment in removable:
            if total <= keep_bytes:
                return
            total -= _segment_size(disk, segment.path)
            disk.unlink(_token_log(segment.path))
            disk.unlink(segment.path)
            if segment.run != run_folder.name:
                _remove_if_empty(disk, segment.path.parent)


def _ended_runs(disk: Disk, run_folder: Path) -> list[Segment]:
    """Segments of the other runs in the folder whose writers have gone."""
    found: list[Segment] = []
    for other in runs(run_folder.parent, disk):
        if other.name == run_folder.name or disk.is_link(other):
            continue
        with contextlib.suppress(OSError):
            if _has_ended(disk, other):
                closed = closed_segments(other, disk)
                first_s = 1 + max((segment.first_s for segment in closed), default=0)
                found += [*closed, Segment(other.name, first_s, other / TRACE_NAME)]
    return found


def _has_ended(disk: Disk, run_folder: Path) -> bool:
    """Whether a run's writer has gone. Raises OSError if that cannot be known."""
    trace = run_folder / TRACE_NAME
    has_trace = has_file(trace, disk)
    # Listed after that: its file may just be renamed, and is the last of these then.
    closed = closed_segments(run_folder, disk)
    if has_trace:
        # One that has only just been made is not locked for a moment. A power failure can leave one empty.
        return bool(closed or _size(disk, trace)) and not is_being_written(trace, disk)
    # Without links, the last segment may be under its closed name alone, for a moment or since its writer died.
    return bool(closed) and not is_being_written(closed[-1].path, disk) and not has_file(trace, disk)


def _remove_if_empty(disk: Disk, run_folder: Path) -> None:
    with contextlib.suppress(OSError):
        # Of a writer that died before it had renamed them.
        disk.unlink(run_folder / NEXT_NAME)
        disk.unlink(run_folder / LATEST_NAME)
        if not closed_segments(run_folder, disk) and disk.status(run_folder / TRACE_NAME) is None:
            # A writer that died after it had named these, and before it named the trace's own files, left them.
            for name in filter(_TOKENS.match, disk.list(run_folder)):
                disk.unlink(run_folder / name)
        disk.remove_folder(run_folder)


def _token_log(trace: Path) -> Path:
    return trace.with_name(tokens_name(trace.name))


def _segment_size(disk: Disk, trace: Path) -> int:
    return _size(disk, trace) + _size(disk, _token_log(trace))


def _size(disk: Disk, path: Path) -> int:
    status = disk.status(path)
    return status.num_bytes if status is not None else 0
