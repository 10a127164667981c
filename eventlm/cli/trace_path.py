"""Where a trace lies: a file, or the folder of a run."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import UsageError


def trace_file(text: str) -> str:
    """The trace that a file's or a run folder's path stands for. Raises UsageError for a folder without one."""
    from eventlm.bus.log_writer import LATEST_NAME, TRACE_NAME

    path = Path(text)
    if not path.is_dir():
        return text
    if not (path / TRACE_NAME).is_file():
        newest = path / LATEST_NAME / TRACE_NAME
        hint = f"the newest run in it is {newest}" if newest.is_file() else "name the folder of a run"
        raise UsageError(f"the folder {text} holds no {TRACE_NAME}; {hint}")
    return str(path / TRACE_NAME)
