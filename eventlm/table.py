"""Tables of text."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

#: On a terminal that is too narrow, text columns are folded between words down to this; numbers never are.
_MIN_TEXT_WIDTH = 16
#: Wider than any table.
_UNLIMITED = 100_000


def aligned(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each name and its value, the values one below the other."""
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return (f"{name:<{width}}  {value}" for name, value in listed)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> Iterator[str]:
    """The lines of a table: columns whose indices are in `left` hold text and are aligned to the left, the others to
    the right. Each is as wide as it must be; only where the output is a terminal, text columns are folded to fit it.
    """
    # Only where there is a table: other output need not wait for it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    least_width = -2
    cells_of_column: list[list[Text]] = []
    found = Table(box=None, pad_edge=False, show_header=False)
    for index, cells in enumerate(zip(columns, *rows, strict=True)):
        width = max(map(len, cells))
        is_text = index in left
        longest_word = max(len(word) for cell in cells for word in ["", *cell.split()])
        least = min(width, max(_MIN_TEXT_WIDTH, longest_word)) if is_text else width
        found.add_column(no_wrap=not is_text, min_width=least)
        least_width += least + 2
        # Aligned here, for rich would strip blanks that end a cell.
        cells_of_column.append([Text(cell, overflow="fold") if is_text else Text(cell.rjust(width)) for cell in cells])
    for row in zip(*cells_of_column, strict=True):
        found.add_row(*row)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED
    console = Console(file=io.StringIO(), width=max(width, least_width), color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(found, crop=False)
    for line in capture.get().splitlines():
        yield line.rstrip()
