"""Loggers that keep the configuration of their first use, as `configure_logging` asks of them."""

from __future__ import annotations

import sys

from structlog._config import BoundLoggerLazyProxy


def forget_cached_loggers() -> None:
    """Let the loggers of all modules look up their configuration again. A command that ran in this process has left
    them with its own, which no later `structlog.configure` would change.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "eventlm":
            # It has none, and may have thousands of objects that do something when they are looked at.
            continue
        for value in vars(module).values():
            if type(value) is BoundLoggerLazyProxy:
                vars(value).pop("bind", None)
