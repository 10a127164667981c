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
import fcntl
import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

TRACE_NAME = "trace.jsonl"
#: A segment that is not complete enough to be read.
NEXT_NAME = "trace.jsonl.next"
LATEST_NAME = "latest"
TOKENS_NAME = "tokens.jsonl"
NEXT_TOKENS_NAME = "tokens.jsonl.next"

_CLOSED = re.compile(r"trace-(\d{12,})\.jsonl")
#: As the engine names its runs, so that nothing else in a folder is ever removed.
_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


class Segment(NamedTuple):
    """A file of a run, to be ordered by run and place."""

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


def closed_segments(run_folder: Path) -> list[Segment]:
    """All but the last segment, in their order. Raises OSError if the folder cannot be read."""
    matches = map(_CLOSED.fullmatch, os.listdir(run_folder))
    found = [Segment(run_folder.name, int(m[1]), run_folder / m[0]) for m in matches if m]
    return sorted(found)


def newest_run(folder: Path) -> Path | None:
    """The folder of the newest run: what `latest` points to, else the last by name; None if there is none."""
    latest = folder / LATEST_NAME
    if (latest / TRACE_NAME).is_file():
        return latest
    with contextlib.suppress(OSError):
        runs = [folder / name for name in sorted(os.listdir(folder)) if _RUN.fullmatch(name)]
        return next((run for run in reversed(runs) if (run / TRACE_NAME).is_file()), None)
    return None


def newest_running(folder: Path) -> Path | None:
    """The folder of the newest run that a writer has open; None if there is none."""
    with contextlib.suppress(OSError):
        for name in sorted(filter(_RUN.fullmatch, os.listdir(folder)), reverse=True):
            with contextlib.suppress(OSError):
                if is_being_written(folder / name / TRACE_NAME):
                    return folder / name
    return None


def is_locked(file: BinaryIO) -> bool:
    """Whether a writer holds the lock of this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def is_being_written(trace: Path) -> bool:
    """Whether a writer holds the lock of the file of this name. Raises OSError if it cannot be opened."""
    with open(trace, "rb") as file:
        # A segment may have begun in between: the file that was opened is closed then, and has the name no more.
        return is_locked(file) or not os.path.samestat(os.fstat(file.fileno()), os.stat(trace))


def prune(run_folder: Path, *, keep_bytes: int, all_runs: bool) -> None:
    """Remove the oldest closed segments until the run has at most `keep_bytes`; its last one always stays.

    With `all_runs` the limit is for all runs of the folder that are not being written, and this one: older runs go
    first. What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        removable = closed_segments(run_folder)
        if all_runs:
            removable = sorted([*removable, *_ended_runs(run_folder)])
        total = sum(map(_segment_size, [run_folder / TRACE_NAME, *(segment.path for segment in removable)]))
        for segment in removable:
            if total <= keep_bytes:
                return
            total -= _segment_size(segment.path)
            _token_log(segment.path).unlink(missing_ok=True)
            segment.path.unlink(missing_ok=True)
            if segment.run != run_folder.name:
                _remove_if_empty(segment.path.parent)


def _ended_runs(run_folder: Path) -> list[Segment]:
    """Segments of the other runs in the folder whose writers have gone."""
    found: list[Segment] = []
    for name in os.listdir(run_folder.parent):
        other = run_folder.parent / name
        if name == run_folder.name or not _RUN.fullmatch(name) or other.is_symlink():
            continue
        with contextlib.suppress(OSError):
            trace = other / TRACE_NAME
            # One that has only just been made is not locked for a moment.
            if _size(trace) and not is_being_written(trace):
                closed = closed_segments(other)
                last = Segment(name, 1 + max((segment.first_s for segment in closed), default=0), trace)
                found += [*closed, last]
    return found


def _remove_if_empty(run_folder: Path) -> None:
    with contextlib.suppress(OSError):
        (run_folder / NEXT_NAME).unlink(missing_ok=True)
        if not closed_segments(run_folder) and not (run_folder / TRACE_NAME).exists():
            # Token logs that a writer has left which died between naming them and the trace's own files.
            for path in run_folder.glob("tokens*.jsonl*"):
                path.unlink()
        run_folder.rmdir()


def _token_log(trace: Path) -> Path:
    return trace.with_name(tokens_name(trace.name))


def _segment_size(trace: Path) -> int:
    return _size(trace) + _size(_token_log(trace))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
