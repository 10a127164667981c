"""Where log events go: stderr, as text for people and as JSON lines for programs.

What a client sent must not reach the log by way of an error: tracebacks have neither local variables nor the messages
of exceptions, which quote what they failed on. Whatever is bound by `structlog.contextvars` (a request's id, its seq
in the trace) is on each line that is logged while that request is handled, libraries' lines included.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import structlog
from structlog.typing import Processor

from eventlm.config import LogConfig
from eventlm.formatting import printable
from eventlm.tracebacks import describe_exception


def configure_logging(
    config: LogConfig | None = None, *, default_level: str = "info", bound: Mapping[str, Any] | None = None
) -> None:
    """Send the events of structlog, and of libraries that use `logging`, to stderr. `bound` is on every line."""
    config = config or LogConfig()
    level = (default_level if config.log_level == "auto" else config.log_level).upper()
    renderer = _renderer(config.log_format)
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _bind(bound or {}),
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        describe_exception,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # Not through `logging`, which takes three times as long: each request is a line.
    structlog.configure(
        processors=[*before, renderer],
        logger_factory=_StderrLogger,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def _bind(bound: Mapping[str, Any]) -> Processor:
    def add(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.update(bound)
        return event

    return add


class _StderrLogger:
    """Writes lines; a closed stderr is ignored."""

    def __init__(self, name: str = "eventlm") -> None:
        self.name = name

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    debug = info = warning = error = critical = msg


def _renderer(log_format: str) -> Processor:
    on_terminal = sys.stderr.isatty()
    if log_format == "text" or (log_format == "auto" and on_terminal):
        render = structlog.dev.ConsoleRenderer(
            colors=on_terminal and "NO_COLOR" not in os.environ, exception_formatter=structlog.dev.plain_traceback
        )
        return lambda logger, method, event: render(logger, method, _printable(event))
    return structlog.processors.JSONRenderer(serializer=_to_json)


def _printable(event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A path may hold control characters of a terminal; they are written as Python escapes them."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception":
            event[name] = printable(value)
    return event


def _to_json(event: Any, **_: Any) -> str:
    # A quarter of what the standard library's encoder takes.
    return msgspec.json.encode(event, enc_hook=repr).decode(errors="replace")
