"""Errors in logs and traces: type and location.

Messages are left out, because exceptions quote what they failed on, and so are local variables.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

_NO_WORD = re.compile(r"[^A-Za-z ]")


def describe(error: BaseException) -> str:
    """The traceback of an error, after those of its causes."""
    return "\n".join(_chain(error))


def describe_exception(logger: object, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: replace `exc_info` by where the exception came from, and its type."""
    found = event.pop("exc_info", None)
    if not found:
        return event
    error = found if isinstance(found, BaseException) else found[1] if isinstance(found, tuple) else sys.exc_info()[1]
    if error is not None:
        event["exception"] = describe(error)
        if event.get("logger") == "asyncio":
            # The message goes on with the representation of what failed.
            event["event"] = _NO_WORD.split(str(event["event"]), maxsplit=1)[0].strip()
    return event


def _chain(error: BaseException) -> list[str]:
    lines: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines = [*_chain(cause), "", "which led to:", ""]
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip("\n")
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return [*lines, "Traceback (most recent call last):", *([frames] if frames else []), name]
