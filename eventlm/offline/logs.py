"""Where the engine's warnings go in a program that has not decided it: to stderr, never among its output."""

from __future__ import annotations

import logging
import sys

import structlog

from eventlm.tracebacks import describe_exception


def log_to_stderr() -> None:
    """Send warnings and errors to stderr, unless the program has configured structlog itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            describe_exception,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Looked up at each event: notebooks and tests replace stderr.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
