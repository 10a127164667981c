"""Warnings on stderr."""

from __future__ import annotations

import sys


def warn(warnings: list[str]) -> None:
    """Print what a user should know to stderr."""
    for warning in warnings:
        print(f"eventlm: warning: {warning}", file=sys.stderr)
