"""`eventlm policies`: list what is installed."""

from __future__ import annotations

import argparse

from eventlm.cli.parser import Parser

HEADINGS = ("KIND", "NAME", "PARAMETERS", "DESCRIPTION", "ORIGIN")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List the installed policies (who goes first), batchers (how large prefill chunks are) and routers\n"
        "(which replica gets a request), with their parameters and defaults. One that cannot be loaded says\n"
        "why."
    )
    parser.epilog = """\
examples:
  eventlm policies
  eventlm serve --policy edf:multiplier=2,min_deadline_ms=300 --router least_loaded --replicas 2
  eventlm serve --policy my_policies:ShortestFirst   a class of my_policies.py in this folder"""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from eventlm.control.plugins import list_plugins

    rows = [
        (info.kind, info.name, info.parameters or "-", info.problem or info.description, info.origin)
        for info in list_plugins()
    ]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for row in (HEADINGS, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
