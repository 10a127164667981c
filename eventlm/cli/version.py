"""`eventlm version`: all versions, for a bug report."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

from eventlm._version import __version__
from eventlm.cli.parser import Parser

DISTRIBUTIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "msgspec",
    "pyzmq",
    "aiohttp",
    "uvloop",
)


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Print the versions of eventlm, Python, the platform and the packages that matter."
    parser.epilog = """\
examples:
  eventlm version      everything, for a bug report
  eventlm --version    the version alone"""
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each; versions are read from metadata, nothing is imported."""
    print(f"eventlm {__version__}")
    print(f"python {platform.python_version()} ({platform.python_implementation()})")
    print(f"platform {platform.platform()}")
    for name in DISTRIBUTIONS:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
    return 0
