"""Flags of the commands that read a trace."""

from __future__ import annotations

import argparse


def add_strict_flag(parser: argparse.ArgumentParser) -> None:
    """`--strict`: what a process that was killed left of its last line is not passed over."""
    parser.add_argument("--strict", action="store_true", help="a torn last line is an error (exit 4)")


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """`--trust-local-plugins`, of commands that run the policies of a trace."""
    parser.add_argument(
        "--trust-local-plugins",
        action="store_true",
        help="import the plug-ins that the trace names as module:Class; do so only for traces that you trust",
    )
