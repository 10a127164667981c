"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> Iterator[str]:
    """The lines of a table: the first `num_left` columns to the left, the others to the right, each as wide as it
    must be."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
