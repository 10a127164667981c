"""The folder of files and batches, which any process of a server may read and which outlives them all.

    DIR/runner.lock                    locked by the one process that runs batches
    DIR/OWNER/files/file-ID.json       a file's object; OWNER identifies a key without revealing it, or is `anyone`
    DIR/OWNER/files/file-ID.jsonl      its content; without a .json a batch is still writing it
    DIR/OWNER/files/file-ID.upload     what has come of an upload
    DIR/OWNER/batches/batch_ID.json    a batch's state
    DIR/OWNER/batches/batch_ID.cancel  its owner wants it cancelled
    DIR/OWNER/batches/batch_ID.stuck-ENOSPC    it waits because nothing can be written

State is replaced as a whole, and what is there once a method returns survives a power failure. A batch's is written by
the process that creates it, and then by the one that runs it.
Folders have mode 0700 and files 0600. All methods may raise OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web
from msgspec import Struct, structs

from eventlm.config import ServerConfig
from eventlm.config.structs import memory_bytes
from eventlm.errors import InputError, UsageError
from eventlm.server.batches.objects import TERMINAL, BatchError, BatchErrors, BatchObject, FileObject
from eventlm.server.batches.results import write_all
from eventlm.server.errors import ApiError
from eventlm.system.disk import WritableFile, sync_path
from eventlm.system.system import System

_log = structlog.get_logger("eventlm.batches")
_LOCK = "runner.lock"
#: The owner of what was made without a key.
_NO_OWNER = "anyone"
#: The folders of owners, which are those of `Principal.owner`. Anything else in the folder belongs to others.
_OWNER = re.compile(rf"{_NO_OWNER}|[0-9a-f]{{32}}")
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_STUCK = ".stuck-"
_DIR_HINT = "choose another folder with --batch-dir DIR"


class FileRecord(Struct, frozen=True, kw_only=True):
    """A file as it is stored. created_ns: Unix time."""

    created_ns: int
    file: FileObject


class BatchRecord(Struct, kw_only=True):
    """A batch as it is stored. output_seconds: how long its files are kept; they have these ids once they exist."""

    created_ns: int
    output_file_id: str
    error_file_id: str
    output_seconds: int
    batch: BatchObject


RecordT = TypeVar("RecordT", FileRecord, BatchRecord)


class BatchFolder:
    """The whole folder. max_bytes: of one owner's files. Raises UsageError if it cannot be used."""

    def __init__(self, system: System, config: ServerConfig) -> None:
        self.path = path = Path(config.batch_dir)
        self.max_bytes = memory_bytes(config.batch_storage)
        #: Set when a batch was created or is to be cancelled, in this process.
        self.changed = asyncio.Event()
        self._system = system
        #: Owners whose folders cannot be used, so that each is logged once.
        self._unusable: set[str] = set()
        try:
            system.disk.make_folders(path)
        except OSError as error:
            raise UsageError(f"cannot make the folder {path}: {error.strerror}; {_DIR_HINT}") from error
        if not system.disk.is_writable(path):
            raise UsageError(f"cannot write to the folder {path}; {_DIR_HINT}")

    def lock(self) -> WritableFile | None:
        """Become the process that runs batches, until the file is closed; None if another one is."""
        disk, path = self._system.disk, self.path / _LOCK
        try:
            if disk.status(path) is None:
                disk.create(path).close()
            return disk.append(path)
        except (FileExistsError, BlockingIOError):
            return None

    def owners(self) -> list[str]:
        """All owners who have anything."""
        names = sorted(filter(_OWNER.fullmatch, self._system.disk.list(self.path)))
        folders = [name for name in names if (found := self._system.disk.status(self.path / name)) and found.is_folder]
        return ["" if name == _NO_OWNER else name for name in folders]

    def for_each(self, action: Callable[[str, OwnerFolder], object]) -> None:
        """Call `action` with each owner and what it has. Owners whose folders cannot be used are skipped."""
        for owner in self.owners():
            folder = self.of(owner)
            try:
                action(owner, folder)
            except OSError as error:
                if owner not in self._unusable:
                    self._unusable.add(owner)
                    _log.error("a folder of batches cannot be used and is skipped", error=str(error))
            else:
                self._unusable.discard(owner)

    def of(self, owner: str) -> OwnerFolder:
        """What one owner has."""
        return OwnerFolder(self._system, self.path / (owner or _NO_OWNER), self.max_bytes)


#: Absent from a server that keeps no files.
BATCHES = web.AppKey("batches", BatchFolder)


class OwnerFolder:
    """One owner's files and batches. max_bytes: of all files together."""

    def __init__(self, system: System, path: Path, max_bytes: int) -> None:
        self.disk = system.disk
        self.max_bytes = max_bytes
        self._system = system
        self._path = path
        self._files = path / "files"
        self._batches = path / "batches"

    def make(self) -> None:
        """Make the folders, where they do not exist."""
        for folder in (self._path, self._files, self._batches):
            self.disk.make_folders(folder)

    def new_file_id(self) -> str:
        """An id."""
        return self._system.chance.identity("file-")

    def new_batch_id(self) -> str:
        """An id."""
        return self._system.chance.identity("batch_")

    # -- files

    def content(self, file_id: str) -> Path:
        """Where a file's lines are."""
        return self._files / f"{file_id}.jsonl"

    def upload(self, file_id: str) -> Path:
        """Where the lines are while they arrive."""
        return self._files / f"{file_id}.upload"

    def files(self) -> list[FileRecord]:
        """All that have not expired, the oldest first."""
        return sorted(self._all_files(), key=lambda record: (record.created_ns, record.file.id))

    def file(self, file_id: str) -> FileRecord:
        """One of them. Raises ApiError (404)."""
        record = self._read(self._files, file_id, FileRecord) if _FILE_ID.fullmatch(file_id) else None
        if record is None or self._has_expired(record):
            raise ApiError(404, f"No such File object: {file_id}", param="id")
        return record

    def add_file(self, record: FileRecord) -> None:
        """Make a file known whose content is there."""
        self._write_whole(self._files / f"{record.file.id}.json", record)

    def remove_file(self, file_id: str) -> None:
        """Remove a file. It is unknown first."""
        self.disk.unlink(self._files / f"{file_id}.json")
        self.disk.unlink(self.content(file_id))
        sync_path(self.disk, self._files)

    @property
    def num_bytes(self) -> int:
        """Of all contents, those that are being written and uploads included."""
        return self._num_bytes((".jsonl", ".upload"))

    @property
    def num_kept_bytes(self) -> int:
        """The same without uploads."""
        return self._num_bytes((".jsonl",))

    def _num_bytes(self, suffixes: tuple[str, ...]) -> int:
        paths = [self._files / name for name in self._names(self._files) if name.endswith(suffixes)]
        return sum(found.num_bytes for path in paths if (found := self.disk.status(path)) is not None)

    # -- batches

    def batches(self) -> list[BatchRecord]:
        """All, the oldest first."""
        found = [self.find_batch(batch_id) for batch_id in self.batch_ids()]
        return sorted(filter(None, found), key=lambda record: (record.created_ns, record.batch.id))

    def batch_ids(self) -> list[str]:
        """The ids of all, in any order."""
        return list(_ids(self._names(self._batches), _BATCH_ID))

    def batch(self, batch_id: str) -> BatchRecord:
        """One of them. Raises ApiError (404)."""
        record = self.find_batch(batch_id) if _BATCH_ID.fullmatch(batch_id) else None
        if record is None:
            raise ApiError(404, f"No batch found with id '{batch_id}'.", param="id")
        return record

    def find_batch(self, batch_id: str) -> BatchRecord | None:
        """One of them; None if there is no such, or its state is damaged."""
        return self._read(self._batches, batch_id, BatchRecord)

    def save(self, record: BatchRecord) -> None:
        """Write a batch's state."""
        self._write_whole(self._batches / f"{record.batch.id}.json", record)

    def remove_batch(self, batch_id: str) -> None:
        """Remove a batch, but not its files."""
        for name in self._names(self._batches):
            if name.startswith(f"{batch_id}."):
                self.disk.unlink(self._batches / name)

    def ask_to_cancel(self, batch_id: str) -> None:
        """Ask the process that runs a batch to cancel it."""
        with contextlib.suppress(FileExistsError):
            self.disk.create(self._cancel(batch_id)).close()
        sync_path(self.disk, self._batches)

    def cancelling_at(self, batch_id: str) -> int | None:
        """When that was asked for, as a Unix time."""
        found = self.disk.status(self._cancel(batch_id))
        return None if found is None else found.modified_ns // 1_000_000_000

    def mark_stuck(self, batch_id: str, number: int) -> None:
        """Note for other processes that a batch waits because of this system error. Takes no room on a full disk."""
        self.disk.create(self._batches / f"{batch_id}{_STUCK}{errno.errorcode.get(number, 'EIO')}").close()

    def clear_stuck(self, batch_id: str) -> None:
        """A batch goes on."""
        for name in self._names(self._batches):
            if name.startswith(f"{batch_id}{_STUCK}"):
                self.disk.unlink(self._batches / name)

    def clear_marks(self, batch_id: str) -> None:
        """A batch is over."""
        self.clear_stuck(batch_id)
        self.disk.unlink(self._cancel(batch_id))

    def seen(self, record: BatchRecord) -> BatchObject:
        """A batch as its owner sees it: with what other processes ask for and tell."""
        batch = record.batch
        if batch.status in TERMINAL:
            return batch
        if (asked_at := self.cancelling_at(batch.id)) is not None:
            batch = structs.replace(batch, status="cancelling", cancelling_at=asked_at)
        for name in self._names(self._batches):
            head, stuck, code = name.partition(_STUCK)
            if stuck and head == batch.id:
                reason = os.strerror(getattr(errno, code, errno.EIO))
                message = f"The server cannot write results ({reason}); the batch goes on as soon as it can."
                code = "disk_full" if code in ("ENOSPC", "EDQUOT") else "disk_error"
                batch = structs.replace(batch, errors=BatchErrors([BatchError(code=code, message=message)]))
        return batch

    # -- what has expired

    def purge(self, batch_cutoff_ns: int) -> None:
        """Remove expired files, what crashes have left, and batches that are over and older than `batch_cutoff_ns`.

        Inputs of batches that are not over stay.
        """
        names = self._names(self._files)
        batches = self.batches()
        running = [record for record in batches if record.batch.status not in TERMINAL]
        inputs = {record.batch.input_file_id for record in running}
        for file in self._all_files(expired=True):
            if file.file.id not in inputs:
                self.remove_file(file.file.id)
        results = {file_id for record in running for file_id in (record.output_file_id, record.error_file_id)}
        known = results.union(_ids(self._names(self._files), _FILE_ID))
        for name in names:
            stem, _, kind = name.partition(".")
            is_ours = kind in ("upload", "jsonl") and _FILE_ID.fullmatch(stem)
            if is_ours and stem not in known:
                self._remove_remainder(self._files / name)
        for record in batches:
            if record.batch.status in TERMINAL and record.created_ns < batch_cutoff_ns:
                self.remove_batch(record.batch.id)

    def _remove_remainder(self, path: Path) -> None:
        """Remove what has come of a file, unless somebody writes it or it has become known meanwhile."""
        try:
            file = self.disk.append(path)
        except (FileNotFoundError, BlockingIOError):
            return
        try:
            # Under the lock: a writer makes the file known before it lets go, and notices if what it has just created
            # was removed.
            if self.disk.status(path.with_suffix(".json")) is None:
                self.disk.unlink(path)
        finally:
            file.close()

    def _all_files(self, *, expired: bool = False) -> Iterator[FileRecord]:
        for file_id in _ids(self._names(self._files), _FILE_ID):
            record = self._read(self._files, file_id, FileRecord)
            if record is not None and self._has_expired(record) == expired:
                yield record

    def _has_expired(self, record: FileRecord) -> bool:
        expires_at = record.file.expires_at
        return expires_at is not None and expires_at <= self._system.clock.unix_s()

    def _cancel(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.cancel"

    def _names(self, folder: Path) -> list[str]:
        try:
            return self.disk.list(folder)
        except FileNotFoundError:
            return []

    def _read(self, folder: Path, name: str, type_: type[RecordT]) -> RecordT | None:
        """A record; None if there is none."""
        path = folder / f"{name}.json"
        try:
            data = self.disk.read(path)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=type_)
        except msgspec.MsgspecError as error:
            _log.error("a file of --batch-dir is damaged and is ignored; remove it", file=str(path), error=str(error))
            return None

    def _write_whole(self, path: Path, record: FileRecord | BatchRecord) -> None:
        """Write or replace a file of state. Its readers see all of it or what was there before. The names of other
        files in its folder are synced, too.
        """
        temporary = path.with_name(path.name + ".new")
        self.disk.unlink(temporary)
        file = self.disk.create(temporary)
        try:
            write_all(file, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
            file.sync()
        except OSError:
            self.disk.unlink(temporary)
            raise
        finally:
            file.close()
        self.disk.rename(temporary, path)
        sync_path(self.disk, path.parent)


def _ids(names: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    """The ids of which there is a state file."""
    return (stem for name in names if name.endswith(".json") and pattern.fullmatch(stem := name.removesuffix(".json")))


def page(records: list[RecordT], ids: list[str], after: str | None, limit: int) -> tuple[list[RecordT], bool]:
    """The `limit` records after the one with the id `after`, and whether there are more. Raises InputError."""
    start = 0
    if after is not None:
        if after not in ids:
            raise InputError("after", f"Invalid value for 'after': there is no '{after}' in this list.")
        start = ids.index(after) + 1
    return records[start : start + limit], start + limit < len(records)
