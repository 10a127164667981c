"""`eventlm policies`: list what is installed."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence

from eventlm.cli.parser import Parser

HEADINGS = ("KIND", "NAME", "ORIGIN")
LAST_HEADING = "PARAMETERS"

#: The width without a terminal, and the least width of the last column.
DEFAULT_COLUMNS = 80
MIN_COLUMNS = 24
_INDENT = "    "


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List the installed policies (which sequence goes first), batchers (how large prefill chunks are) and\n"
        "routers (which replica gets a request), with their parameters and defaults, and the error of one that\n"
        "cannot be loaded."
    )
    parser.epilog = """\
examples:
  eventlm policies
  eventlm serve --policy edf:multiplier=2 --router prefix_affinity --replicas 2
  eventlm serve --policy shortest:Shortest    a class of your shortest.py"""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, no wider than the terminal: each plug-in's row, and its description under it."""
    from eventlm.engine.plugins.registry import list_plugins

    infos = list_plugins()
    rows = [(info.kind, info.name, info.origin) for info in infos]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    columns = shutil.get_terminal_size((DEFAULT_COLUMNS, 0)).columns
    print(_row(HEADINGS, LAST_HEADING, widths, columns))
    for info, row in zip(infos, rows, strict=True):
        print(_row(row, info.parameters or "-", widths, columns))
        print(_wrapped(info.problem or info.description, _INDENT, _INDENT, columns))
    return 0


def _row(cells: Sequence[str], last: str, widths: Sequence[int], columns: int) -> str:
    """Aligned cells and then the last one, which goes on under itself."""
    start = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
    return _wrapped(last, start, " " * len(start), columns)


def _wrapped(text: str, start: str, indent: str, columns: int) -> str:
    # Names and paths stay whole, so that they can be copied.
    return textwrap.fill(
        text,
        max(columns, len(start) + MIN_COLUMNS),
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
