"""Cutting the torn tail off a trace whose writer died within a line."""

from __future__ import annotations

import contextlib
from pathlib import Path

from msgspec import Struct

from eventlm.bus.segment_reader import SegmentReader
from eventlm.errors import UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk

_CHUNK_BYTES = 1 << 20


class RepairResult(Struct, frozen=True):
    """What a repair did. `copy` is where the torn file is kept; empty if there was nothing to repair."""

    path: str
    num_lines: int
    removed_bytes: int = 0
    copy: str = ""


def repair(path: Path | str, disk: Disk = SYSTEM_DISK) -> RepairResult:
    """Truncate a torn trace after its last complete line, and keep the file as it was as `<name>.broken`.

    A whole trace is left as it is. Raises UsageError while the trace is being written or where there is no
    room for the copy, TraceCorruptError for damage that is not a torn tail.
    """
    path = Path(path)
    with SegmentReader(path, disk=disk) as reader:
        for _line in reader:
            pass
        if reader.still_being_written:
            raise _in_use(path)
        if reader.torn is None:
            return RepairResult(path=str(path), num_lines=reader.num_lines)
        num_lines, tail, size_bytes = reader.num_lines, reader.torn, reader.size_bytes
    try:
        copy = _cut(disk, path, tail.byte_offset, size_bytes)
    except BlockingIOError as error:
        raise _in_use(path) from error
    except OSError as error:
        raise UsageError(f"cannot repair {path}: {error.strerror}; it is as it was") from error
    return RepairResult(path=str(path), num_lines=num_lines, removed_bytes=tail.num_bytes, copy=str(copy))


def _in_use(path: Path) -> UsageError:
    return UsageError(f"{path} is still being written; stop the engine that records it, then repair")


def _cut(disk: Disk, path: Path, byte_offset: int, size_bytes: int) -> Path:
    """Copy the file, make the copy durable, and only then truncate the file."""
    with contextlib.closing(disk.append(path)) as file:
        if file.status().num_bytes != size_bytes:
            raise _in_use(path)
        copy = _free_name(disk, path)
        with contextlib.closing(disk.create(copy)) as kept, contextlib.closing(disk.open(path)) as content:
            try:
                while chunk := content.read(_CHUNK_BYTES):
                    while chunk:
                        chunk = chunk[kept.write(chunk) :]
                kept.sync()
            except OSError:
                disk.unlink(copy)
                raise
        file.truncate(byte_offset)
        file.sync()
    return copy


def _free_name(disk: Disk, path: Path) -> Path:
    copy, number = path.with_name(f"{path.name}.broken"), 1
    while disk.status(copy) is not None:
        number += 1
        copy = path.with_name(f"{path.name}.{number}.broken")
    return copy
