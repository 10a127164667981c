"""What commands print: a report, or an object as JSON; warnings and progress bars on stderr.

There is a bar only on a terminal, and only for files that take a while to read.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from eventlm.engine.replicas.group import OnStartProgress
    from eventlm.worker.protocol import StartProgress

#: A smaller file is read too fast for a bar.
MIN_BYTES = 8 * 1024 * 1024
#: Of what is fast as a rule: only if it takes longer there is a bar.
SECONDS_BEFORE_BAR = 0.5
#: Formats of the bar for a phase of a start that can be counted, and for one that cannot.
_COUNTED, _NOT_COUNTED = "{desc}: {percentage:3.0f}%|{bar}|", "{desc} …"


def print_report(lines: Iterable[str], as_json: object = None, *, warnings: Iterable[str] = ()) -> None:
    """Print the lines, or `as_json` in their place if it is not None, and then the warnings."""
    if as_json is None:
        print("\n".join(lines))
    else:
        print(msgspec.json.encode(as_json).decode())
    warn(warnings)


def warn(warnings: Iterable[str]) -> None:
    """Print a line for each warning."""
    for warning in warnings:
        print(f"eventlm: warning: {warning}", file=sys.stderr)


def is_long(path: str, min_bytes: int = MIN_BYTES) -> bool:
    """Whether a file, or the files of a folder, have so many bytes."""
    try:
        files = Path(path).iterdir() if Path(path).is_dir() else [Path(path)]
        return sum(file.stat().st_size for file in files) >= min_bytes
    except OSError:
        return False


def file_progress(
    description: str, path: str, *, min_bytes: int = MIN_BYTES
) -> contextlib.AbstractContextManager[Callable[[int, int], None] | None]:
    """As `count_progress` of bytes, without a bar for less than `min_bytes`."""
    return count_progress(description, "byte", is_long=is_long(path, min_bytes))


@contextlib.contextmanager
def count_progress(
    description: str, unit: str, *, is_long: bool = True, delay: float = 0.0
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for (things done, things in all), or None where no bar is shown.

    `unit` is the name of one; bytes are shown in multiples. delay: seconds before there is a bar.
    """
    if not is_long or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    bytes_: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    units = bytes_ if unit == "byte" else {"unit": f" {unit}s"}
    with tqdm(desc=description, **units, file=sys.stderr, leave=False, delay=delay) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


@contextlib.contextmanager
def start_progress(num_replicas: int) -> Iterator[OnStartProgress | None]:
    """Yield a callback for what workers do until they are ready, or None where no bar is shown."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc="starting", bar_format=_NOT_COUNTED, file=sys.stderr, leave=False) as bar:

        def on_progress(replica: int, progress: StartProgress) -> None:
            bar.bar_format = _COUNTED if progress.total else _NOT_COUNTED
            bar.total, bar.n = progress.total, progress.done
            bar.set_description_str(f"replica {replica}: {progress.phase}" if num_replicas > 1 else progress.phase)

        yield on_progress
