"""The writer: event bodies in, chained lines in the segments of a run's folder out.

`append` only keeps the body. Chaining, joining and write(2) happen once a step in `flush`, so a step pays one system
call for its record. What `flush` has written survives `kill -9`: it is in the kernel's page cache.

What `sync` has brought to the disk survives a power failure, too.

A disk that is full or broken never stops the engine. The file is cut after its last whole line, and nothing more is
kept until a new segment can be started. That one has a `gap`, which names the missing events, and begins with a
snapshot, so what follows can be verified again. If a sync fails, everything since the last one is missing: any part of
it may be gone after a reboot, so it is cut off, and the gap names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from eventlm.bus.run_folder import LATEST_NAME, NEXT_NAME, TRACE_NAME, closed_name, prune
from eventlm.bus.segment_file import SegmentFile, SideFile
from eventlm.bus.spool import SpoolWriter
from eventlm.bus.token_log import TokenLogWriter, last_token_log
from eventlm.errors import EventLMError, UsageError
from eventlm.events import Header
from eventlm.events.header_check import decode_header
from eventlm.system.disk import Disk, sync_path
from eventlm.system.system import System
from eventlm.system.whole_file import exit_code_of

#: How long nothing is tried after a failed write, doubled with each further one up to the second.
RETRY_NS = 1_000_000_000
MAX_RETRY_NS = 60 * RETRY_NS


class LogWriteError(EventLMError):
    """The trace could not be created where it was asked for."""

    exit_code = UsageError.exit_code


class LogWriter:
    """Writes the segments of `folder/<run>`, mode 0600 in a folder of mode 0700, and with the first line points
    `folder/latest` to it. A run without a line leaves nothing.

    The last segment is locked (flock, exclusive) for the writer's life, which is how a reader knows that a run
    still goes on. segment_bytes: a new one is due once the last has so much after its snapshot; keep_bytes: what the
    run (with `keep_all_runs`: all of the folder's runs) may take, oldest segments removed first. 0 is no limit.
    digest_key: with one, token ids are written too, to a token log (`eventlm.bus.token_log`); its bytes count.
    spool: is written as well, and first. last: the last segment of a run that goes on.
    syncs: what begins a segment is synced, with its name, before anything else is written to it, and so is all that
    was written when it is closed; `sync` does the rest. on_sync: called with the time that one took, in nanoseconds.

    Counters are as of the last flush, of the trace alone: num_events and num_bytes written; next_s is that of the next
    line to be written, previous_h the hash before it. problem: why nothing is written at the moment, else empty;
    `on_problem` is called when one begins and when it is over. Raises LogWriteError when the first file cannot be made,
    locked or written.

    It may be used in one thread after the other, but by one at a time.
    """

    def __init__(
        self,
        system: System,
        folder: Path | str,
        run: str,
        *,
        segment_bytes: int = 0,
        keep_bytes: int = 0,
        keep_all_runs: bool = False,
        digest_key: bytes = b"",
        spool: SpoolWriter | None = None,
        last: SegmentFile | None = None,
        syncs: bool = False,
        on_sync: Callable[[int], None] | None = None,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        self._disk = system.disk
        self._clock = system.clock
        self.run_folder = Path(folder) / run
        self.path = self.run_folder / TRACE_NAME
        self.problem = ""
        self._segment_bytes = segment_bytes
        self._keep_bytes = keep_bytes
        self._keep_all_runs = keep_all_runs
        self._syncs = syncs
        self._on_sync = on_sync
        self._on_problem = on_problem
        self._token_log: TokenLogWriter | None = None
        self.spool = spool
        #: A fact whose record is there and which is not itself has no effect, but not the other way round.
        self._side_files: list[SideFile] = [spool] if spool is not None else []
        self._is_closed = False
        #: Of the segments before the last.
        self._num_closed_events = 0
        self._num_closed_bytes = 0
        #: The run that `latest` pointed to before this one.
        self._latest_before = ""
        self._bodies: list[bytes] = []
        self._frames: list[bytes] = []
        self._retry_ns = RETRY_NS
        self._retry_at_ns = 0
        try:
            self._file = self._create(digest_key) if last is None else self._go_on_with(last, digest_key)
        except OSError as error:
            raise _unwritable("record to", self.path, error) from error

    @staticmethod
    def check_folder(disk: Disk, folder: Path | str) -> None:
        """Make the folder, so that a run that could not be recorded fails before it costs anything.

        Raises LogWriteError if it cannot be made or written.
        """
        try:
            disk.make_folders(Path(folder))
        except OSError as error:
            raise _unwritable("record to", folder, error) from error
        if not disk.is_writable(Path(folder)):
            raise LogWriteError(f"cannot record to {folder}: no permission to write; choose another folder")
        latest = Path(folder) / LATEST_NAME
        status = disk.status(latest)
        if status is not None and status.is_folder and not disk.is_link(latest):
            raise LogWriteError(f"cannot replace {latest}: Is a directory; choose another folder")

    def _create(self, digest_key: bytes) -> SegmentFile:
        self._disk.make_folders(self.run_folder.parent)
        self._disk.make_folder(self.run_folder)
        try:
            if digest_key:
                self._token_log = TokenLogWriter(self._disk, self.run_folder, digest_key)
                self._side_files.append(self._token_log)
            file = SegmentFile(self._disk, self.path, first_s=0)
        except OSError:
            self._remove_run()
            raise
        self._prune()
        return file

    def _go_on_with(self, last: SegmentFile, digest_key: bytes) -> SegmentFile:
        if digest_key:
            tokens = last_token_log(self._disk, self.run_folder, last)
            self._token_log = TokenLogWriter(self._disk, self.run_folder, digest_key, tokens)
            self._side_files.append(self._token_log)
        # The engine before may have died just before it did so.
        self._name_run()
        return last

    @property
    def num_events(self) -> int:
        """Lines of all segments."""
        return self._num_closed_events + self._file.written.num_lines

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return self._num_closed_bytes + self._file.written.num_bytes

    @property
    def next_s(self) -> int:
        """Of the next line to be written."""
        return self._file.first_s + self._file.written.num_lines

    @property
    def previous_h(self) -> str:
        """The hash before it."""
        return self._file.written.last_h

    def _point_latest_here(self) -> None:
        latest = self.run_folder.parent / LATEST_NAME
        if self._disk.is_link(latest):
            self._latest_before = self._disk.resolve(latest).name
        self._point_to(self.run_folder.name)

    def _point_to(self, run: str) -> None:
        link = self.run_folder / LATEST_NAME
        # Of an engine that died before it could rename it.
        self._disk.unlink(link)
        self._disk.symlink(run, link)
        self._disk.rename(link, self.run_folder.parent / LATEST_NAME)

    def append(self, body: bytes) -> None:
        """Take the next event's body, as `encode_body` made it. Written by the next `flush`."""
        if not self.problem:
            self._bodies.append(body)

    def append_tokens(self, bodies: list[bytes]) -> None:
        """Take lines of the token log, as `encode_line` made them. The next `flush` writes them before all events."""
        if not self.problem:
            assert self._token_log is not None
            self._token_log.append(bodies)

    def append_records(self, frames: Sequence[bytes]) -> None:
        """Take frames of the spool. The next `flush` writes them before all events."""
        if not self.problem:
            self._frames += frames

    def flush(self) -> None:
        """Chain and write all that was appended; when it returns, those lines survive the death of this process, or
        `problem` says why they are lost.

        Raises LogWriteError if not even the header can be written, or no reader would take it.
        """
        bodies, self._bodies = self._bodies, []
        frames, self._frames = self._frames, []
        if self._is_closed or not (bodies or frames):
            return
        if self.spool is not None:
            self.spool.append(frames)
        is_first = not self.num_events
        if is_first:
            # The chain of a branch begins with the line of the run that it follows.
            header = self._check_header(bodies[0])
            self._file.continue_from(header.s, header.previous_h)
        error = self._write(bodies)
        if is_first and self.num_events:
            error = self._begin_run() or error
        if error is None:
            return
        if not self.num_events:
            raise _unwritable("write to the trace", self.path, error)
        self._fail(error)

    def _write(self, bodies: list[bytes]) -> OSError | None:
        """Side files come first: a fact without its tokens would be worth less than none."""
        for side in self._side_files:
            if (error := side.flush()) is not None:
                return error
        return self._file.write(bodies)

    def _begin_run(self) -> OSError | None:
        """The run has its header: sync it, and let `latest` point to it; then sync all names that lead there."""
        failed = self._sync() if self._syncs else None
        if failed is None:
            self._name_run()
        return failed

    def _name_run(self) -> None:
        """Let `latest` point to this run, and sync all names that lead there. Raises LogWriteError."""
        try:
            self._point_latest_here()
        except OSError as error:
            raise _unwritable("replace", self.run_folder.parent / LATEST_NAME, error) from error
        try:
            if self._syncs:
                sync_path(self._disk, self.run_folder)
        except OSError as error:
            raise _unwritable("sync", self.run_folder, error) from error

    def sync(self) -> None:
        """Return once all that was flushed survives a power failure, or `problem` says why it is lost."""
        if not self.problem and not self._is_closed and (error := self._sync()) is not None:
            self._fail(error)

    def _sync(self) -> OSError | None:
        """Side files come first, as they were written."""
        if self._file.is_synced and (self.spool is None or self.spool.is_synced):
            return None
        start_ns = self._clock.monotonic_ns()
        files: list[SideFile | SegmentFile] = [*self._side_files, self._file]
        for file in files:
            if (error := file.sync()) is not None:
                self._file.cut_unsynced()
                return error
        if self._on_sync is not None:
            self._on_sync(self._clock.monotonic_ns() - start_ns)
        return None

    def _check_header(self, body: bytes) -> Header:
        try:
            return decode_header(body)
        except ValueError as error:
            raise LogWriteError(f"cannot record to {self.path}, because nothing could read it: {error}") from error

    def _fail(self, error: OSError) -> None:
        """Stop writing, for longer with every failure in a row."""
        self._bodies.clear()
        self._frames.clear()
        for side in self._side_files:
            side.clear()
        is_new = not self.problem
        self._retry_ns = RETRY_NS if is_new else min(2 * self._retry_ns, MAX_RETRY_NS)
        self._retry_at_ns = self._clock.monotonic_ns() + self._retry_ns
        self.problem = error.strerror or type(error).__name__
        if self.spool is not None:
            self.spool.note_loss()
        if is_new and self._on_problem is not None:
            self._on_problem(f"cannot write to the trace {self.path}: {self.problem}; events are lost until it can be")

    def give_up(self, problem: str) -> None:
        """Keep nothing more until a segment is started, which may be tried at once. Does not call `on_problem`.

        If the last segment has only its beginning, writing that took too long: then it is tried later.
        """
        if self.problem:
            return
        self.problem = problem
        self._retry_ns = RETRY_NS
        self._retry_at_ns = self._clock.monotonic_ns() + (0 if self._file.num_own_bytes else RETRY_NS)

    @property
    def segment_due(self) -> bool:
        """Whether `start_segment` should be called: the last one is long enough, or writing may be possible again."""
        num_own_bytes = self._file.num_own_bytes + sum(side.num_own_bytes for side in self._side_files)
        is_long = 0 < self._segment_bytes <= num_own_bytes
        return (is_long or bool(self.problem)) and self._clock.monotonic_ns() >= self._retry_at_ns

    def start_segment(self, first_s: int, bodies: Iterator[bytes], *, is_stamped: bool = False) -> bool:
        """Close the last segment and start one with these lines, the first of which is the header, event `first_s`.

        Each is written before the next is taken. False if that failed: then the lines taken (with `is_stamped`: all of
        them) are lost, and all that follow, until `segment_due` is true again and another segment is started.
        """
        self.flush()
        # Even after a failed write: what was written before that is closed, too.
        if self._syncs and (error := self._sync()) is not None:
            self._fail(error)
            return False
        file: SegmentFile | None = None
        try:
            self._file.truncate()
            for side in self._side_files:
                side.start_file(first_s)
            next_path = self.run_folder / NEXT_NAME
            self._disk.unlink(next_path)
            file = SegmentFile(self._disk, next_path, first_s=first_s, previous_h=self.previous_h)
            is_stamped = True
            self._write_beginning(file, bodies)
            self._name_files(file)
        except OSError as error:
            if file is not None:
                file.remove()
            for side in self._side_files:
                side.go_back()
            if is_stamped or self.problem or (self.spool is not None and not self.spool.has_file):
                self._fail(error)
            else:
                # The last segment can go on as it is.
                self._retry_at_ns = self._clock.monotonic_ns() + MAX_RETRY_NS
            return False
        self._go_on(file)
        return True

    def _write_beginning(self, file: SegmentFile, bodies: Iterator[bytes]) -> None:
        for body in bodies:
            if (error := file.write([body])) is not None:
                raise error
        file.begin()
        if self._syncs:
            for error in (*(side.sync_next() for side in self._side_files), file.sync()):
                if error is not None:
                    raise error

    def _name_files(self, file: SegmentFile) -> None:
        """Name the files of the last segment and of this one, the trace's after those beside it. No file of the last
        segment is without a name at any moment, nor on a disk that brings names to the medium in any order.
        """
        for side in self._side_files:
            side.name_closed()
        self._file.close_as(self.run_folder / closed_name(self._file.first_s))
        self._sync_names()
        for side in self._side_files:
            side.name_next()
        file.rename(self.path)

    def _sync_names(self) -> None:
        if self._syncs:
            self._disk.sync_folder(self.run_folder)

    def _go_on(self, file: SegmentFile) -> None:
        """A segment has begun."""
        first_missing_s, problem = self.next_s, self.problem
        closed, self._file, self.problem = self._file, file, ""
        self._num_closed_events += closed.written.num_lines
        self._num_closed_bytes += closed.written.num_bytes
        closed.close()
        for side in self._side_files:
            side.go_on()
        if problem and self._on_problem is not None:
            missing = f"events {first_missing_s} to {file.first_s - 1} are not in it: {problem}"
            if file.first_s == first_missing_s:
                missing = "no event was lost"
            self._on_problem(f"the trace {self.path} is written again; {missing}")
        self._prune()
        try:
            self._sync_names()
        except OSError as error:
            self._fail(error)

    def _prune(self) -> None:
        """Leave room for the segment that has just begun."""
        if self._keep_bytes:
            keep_bytes = max(self._keep_bytes - self._segment_bytes, 0)
            prune(self._disk, self.run_folder, keep_bytes=keep_bytes, all_runs=self._keep_all_runs)

    def close(self) -> None:
        """Flush, close the file and with it release the lock. A second call does nothing."""
        if self._is_closed:
            return
        try:
            self.flush()
            if self._syncs:
                self.sync()
            with contextlib.suppress(OSError):
                self._file.truncate()
        finally:
            self._is_closed = True
            self._file.close()
            for side in self._side_files:
                with contextlib.suppress(OSError):
                    side.close()
            if not self.num_events:
                self._remove_run()

    def discard(self) -> None:
        """Close the file and remove the run, which is of one segment; `latest` is again what it was before."""
        self._bodies.clear()
        self.close()
        latest = self.run_folder.parent / LATEST_NAME
        with contextlib.suppress(OSError):
            if self._disk.resolve(latest) == self._disk.resolve(self.run_folder):
                self._disk.unlink(latest)
                if self._latest_before:
                    self._point_to(self._latest_before)
        self._remove_run()

    def _remove_run(self) -> None:
        """Without a header it cannot be read, and would never be removed."""
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)
            for side in self._side_files:
                side.remove()
            self._disk.remove_folder(self.run_folder)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unwritable(what: str, path: Path | str, error: OSError) -> LogWriteError:
    return LogWriteError(
        f"cannot {what} {path}: {error.strerror}; choose another folder", exit_code=exit_code_of(error)
    )
