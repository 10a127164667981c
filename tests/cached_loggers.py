"""Loggers that keep the configuration of their first use, as `configure_logging` asks of them."""

from __future__ import annotations

import sys

from structlog._config import BoundLoggerLazyProxy


def forget_cached_loggers() -> None:
    """Let the loggers of all modules look up their configuration again. A command that ran in this process has left
    them with its own, which no later `structlog.configure` would change.
    """
    for module in list(sys.modules.values()):
        for value in list(vars(module).values()):
            if isinstance(value, BoundLoggerLazyProxy):
                vars(value).pop("bind", None)
