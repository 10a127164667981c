"""Where the engine's warnings go in a program that has not decided it: to stderr, never among its output."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr() -> None:
    """Send warnings and errors to stderr, unless the program has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Looked up at each event: notebooks and tests replace stderr.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
