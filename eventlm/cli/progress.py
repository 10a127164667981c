"""Progress bars on stderr; silent where nobody watches, and for files that are read at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventlm.engine.replicas.group import OnStartProgress
    from eventlm.worker.protocol import StartProgress

#: A smaller file is read before a bar could be seen.
MIN_BYTES = 8 * 1024 * 1024
_BYTES: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
#: Of a phase of a start: one that can be counted, one that cannot.
_COUNTED, _NOT_COUNTED = "{desc}: {percentage:3.0f}%|{bar}|", "{desc} …"


@contextlib.contextmanager
def file_progress(
    description: str, path: str, *, min_bytes: int = MIN_BYTES
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for (bytes done, bytes in all), or None where no bar is shown: for less than `min_bytes`."""
    try:
        files = Path(path).iterdir() if Path(path).is_dir() else [Path(path)]
        is_long = sum(file.stat().st_size for file in files) >= min_bytes
    except OSError:
        is_long = False
    if not is_long or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=description, **_BYTES, file=sys.stderr, leave=False) as bar:
        yield _advance(bar)


@contextlib.contextmanager
def count_progress(description: str, unit: str, *, is_long: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for (things done, things in all), or None where no bar is shown.

    `unit` is the name of one; bytes are shown in multiples.
    """
    if not is_long or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    units = _BYTES if unit == "byte" else {"unit": f" {unit}s"}
    with tqdm(desc=description, **units, file=sys.stderr, leave=False) as bar:
        yield _advance(bar)


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


def _advance(bar: Any) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return on_progress
