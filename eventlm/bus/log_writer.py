"""The recorder: event bodies in, chained lines in a file out.

`append` only keeps the body; chaining, joining and write(2) happen once a step in `flush`, so that what a
step pays for its record is one system call. What `flush` has written survives `kill -9`: it is in the
kernel's page cache.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from eventlm.errors import EventLMError
from eventlm.events.codec import chain, close_line

TRACE_NAME = "trace.jsonl"
LATEST_NAME = "latest"


class LogWriteError(EventLMError):
    """The trace could not be created or written."""


class LogWriter:
    """Writes `folder/<run>/trace.jsonl`, mode 0600 in a folder of mode 0700, and points `folder/latest` to
    it.

    The file is locked (flock, exclusive) for the writer's life, which is how a reader knows that a run
    still goes on. Counters are as of the last flush: num_events, num_bytes. Raises LogWriteError when the file
    cannot be made, locked or written.
    """

    def __init__(self, folder: Path | str, run: str) -> None:
        self.run_folder = Path(folder) / run
        self.path = self.run_folder / TRACE_NAME
        self.num_events = 0
        self.num_bytes = 0
        self._bodies: list[bytes] = []
        self._unwritten = b""
        self._previous_h = ""
        try:
            self._fd = self._create()
        except OSError as error:
            raise LogWriteError(f"cannot record to {self.path}: {error.strerror}; choose another folder") from error

    @staticmethod
    def check_folder(folder: Path | str) -> None:
        """Make the folder, so that a run that could not be recorded fails before it costs anything.

        Raises LogWriteError if it cannot be made or written.
        """
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise LogWriteError(f"cannot record to {folder}: {error.strerror}; choose another folder") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LogWriteError(f"cannot record to {folder}: no permission to write; choose another folder")

    def _create(self) -> int:
        self.run_folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.run_folder.mkdir(mode=0o700)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # Blocking, because a reader that probes the lock holds it for a moment.
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._point_latest_here()
        except OSError:
            os.close(fd)
            raise
        return fd

    def _point_latest_here(self) -> None:
        run = self.run_folder.name
        link = self.run_folder / LATEST_NAME
        link.symlink_to(run)
        link.replace(self.run_folder.parent / LATEST_NAME)

    def append(self, body: bytes) -> None:
        """Take the next event's body, as `encode_body` made it. Written by the next `flush`."""
        self._bodies.append(body)

    def flush(self) -> None:
        """Chain and write all that was appended; when it returns, those lines survive the death of this
        process.

        After a LogWriteError nothing is lost: the next flush goes on at the byte where this one stopped.
        """
        if not self._bodies and not self._unwritten:
            return
        try:
            self._close_lines()
            while self._unwritten:
                written = os.write(self._fd, self._unwritten)
                self.num_bytes += written
                self._unwritten = self._unwritten[written:]
        except OSError as error:
            raise LogWriteError(
                f"cannot write to the trace {self.path}: {error.strerror}; "
                f"{self.num_bytes} bytes of it are written, {len(self._unwritten)} are not"
            ) from error

    def _close_lines(self) -> None:
        lines = []
        h = self._previous_h
        for body in self._bodies:
            h = chain(h, body)
            lines.append(close_line(body, h))
        self._previous_h = h
        self.num_events += len(lines)
        self._bodies.clear()
        self._unwritten += b"".join(lines)

    def close(self) -> None:
        """Flush, close the file and with it release the lock. A second call does nothing."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            # Not by closing alone: a fork of this process may live on, and it has the file open too.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
