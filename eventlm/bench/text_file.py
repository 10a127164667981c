"""Reading the files that a load test is given."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import UsageError


def read_text_file(flag: str, path: str) -> str:
    """The text of a UTF-8 file, with or without a byte order mark. Raises UsageError that names the flag."""
    try:
        return Path(path).expanduser().read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: this is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror or error}") from error
