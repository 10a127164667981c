"""Cutting the torn tail off a trace whose writer died within a line."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from msgspec import Struct

from eventlm.bus.segment_reader import SegmentReader
from eventlm.errors import UsageError


class RepairResult(Struct, frozen=True):
    """What a repair did. `copy` is where the torn file is kept; empty if there was nothing to repair."""

    path: str
    num_lines: int
    removed_bytes: int = 0
    copy: str = ""


def repair(path: Path | str) -> RepairResult:
    """Truncate a torn trace after its last complete line, and keep the file as it was as `<name>.broken`.

    A whole trace is left as it is. Raises UsageError while the trace is being written or where there is no
    room for the copy, TraceCorruptError for damage that is not a torn tail.
    """
    path = Path(path)
    with SegmentReader(path) as reader:
        for _line in reader:
            pass
        if reader.still_being_written:
            raise _in_use(path)
        if reader.torn is None:
            return RepairResult(path=str(path), num_lines=reader.num_lines)
        num_lines, tail, size_bytes = reader.num_lines, reader.torn, reader.size_bytes
    try:
        copy = _cut(path, tail.byte_offset, size_bytes)
    except BlockingIOError as error:
        raise _in_use(path) from error
    except OSError as error:
        raise UsageError(f"cannot repair {path}: {error.strerror}; it is as it was") from error
    return RepairResult(path=str(path), num_lines=num_lines, removed_bytes=tail.num_bytes, copy=str(copy))


def _in_use(path: Path) -> UsageError:
    return UsageError(f"{path} is still being written; stop the engine that records it, then repair")


def _cut(path: Path, byte_offset: int, size_bytes: int) -> Path:
    """Copy the file, make the copy durable, and only then truncate the file."""
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_size != size_bytes:
            raise _in_use(path)
        copy = _free_name(path)
        fd = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as kept:
                shutil.copyfileobj(file, kept)
                kept.flush()
                os.fsync(kept.fileno())
        except OSError:
            copy.unlink()
            raise
        file.truncate(byte_offset)
        os.fsync(file.fileno())
    return copy


def _free_name(path: Path) -> Path:
    copy, number = path.with_name(f"{path.name}.broken"), 1
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.{number}.broken")
    return copy
