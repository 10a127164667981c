"""A file that gets its name once it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from eventlm.errors import ExitCode, UsageError

#: The system's errors when there is no more room for a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WholeFile:
    """`file` is written under another name in the same folder until `finish`; `discard` removes what is not finished.

    mode: before the umask; as a rule its owner alone can read it. Raises OSError.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        self.file: IO[bytes] = os.fdopen(descriptor, "wb")

    def finish(self) -> None:
        """Replace what has its name."""
        self.file.close()
        self._partial.replace(self.path)

    def discard(self) -> None:
        """Remove it, unless it is finished."""
        with contextlib.suppress(OSError, ValueError):
            self.file.close()
        self._partial.unlink(missing_ok=True)


def exit_code_of(error: OSError) -> ExitCode:
    """The exit code when something cannot be written. A full disk may have room another time."""
    return ExitCode.FAILED if error.errno in _FULL else ExitCode.USAGE


def cannot_write(path: Path, error: OSError, what: str) -> UsageError:
    """The error for a file or folder that cannot be written."""
    text = f"cannot write to {path}: {error.strerror}; choose another {what} with -o"
    return UsageError(text, exit_code=exit_code_of(error))


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` if nothing goes wrong. Folders on the way are made.

    A pipe or a device is written to as it is, and a link is followed. Raises UsageError if it cannot be written.
    """
    whole: WholeFile | None = None
    try:
        if path.is_dir():
            raise UsageError(f"cannot write to {path}: it is a folder; name a file with -o")
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = WholeFile(Path(os.path.realpath(path)))
        yield whole.file
        whole.finish()
    except OSError as error:
        raise cannot_write(path, error, "file") from error
    finally:
        if whole is not None:
            whole.discard()
