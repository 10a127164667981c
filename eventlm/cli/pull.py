"""`eventlm pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse

from eventlm.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    from eventlm.models.default import DEFAULT_MODEL, KNOWN_MODELS

    parser.description = (
        "Fetch a model once into the cache (EVENTLM_HOME, else the user's cache folder) and print the\n"
        "folder of its checkpoint. Progress goes to stderr. What is there already is not fetched again."
    )
    parser.epilog = """\
examples:
  eventlm pull                            fetch the default model
  ls "$(eventlm pull smollm2)"            look at its files
  EVENTLM_HOME=/data/eventlm eventlm pull keep it elsewhere"""
    parser.add_argument(
        "name",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"model to fetch: {', '.join(KNOWN_MODELS)} (default: {DEFAULT_MODEL})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the folder on stdout."""
    from eventlm.models.pull import pull

    print(pull(arguments.name))
    return 0
