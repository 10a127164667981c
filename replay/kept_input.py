"""What a command reads is not what it replaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eventlm.bus.run_folder import TRACE_NAME, is_closed_name, tokens_name
from eventlm.errors import UsageError


def check_keeps_input(output: Path | str, read: Path | str, *, flag: str = "-o") -> None:
    """Raise UsageError if a file to write is the one that is read, lies in the folder that is, or belongs to the run of
    the segment that is.
    """
    target = Path(output)
    if target.exists() and any(target.samefile(file) for file in _read_files(Path(read)) if file.exists()):
        raise UsageError(f"{flag} {output} would replace what is read from {read}; choose another file")


def _read_files(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield from source.iterdir()
        return
    yield source
    segment = source.resolve()
    if _is_segment(segment.name) and segment.exists():
        for sibling in segment.parent.iterdir():
            if _is_segment(sibling.name):
                yield sibling
                yield sibling.with_name(tokens_name(sibling.name))


def _is_segment(name: str) -> bool:
    return name == TRACE_NAME or is_closed_name(name)
