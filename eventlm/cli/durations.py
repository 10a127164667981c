"""Lengths of time in words of the command line."""

from __future__ import annotations

import re
from decimal import Decimal

from eventlm.errors import UsageError

_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000, "h": 3_600_000_000_000}
_DURATION = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(ns|us|ms|s|min|h)")


def nanoseconds(text: str, *, flag: str) -> int:
    """What `1.5s`, `20ms` or `2min` stand for, exactly; parts of a nanosecond are cut off. Raises UsageError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text}: not a time; give a number with a unit ({', '.join(_UNITS)}), such as 1.5s")
    return int(Decimal(match[1]) * _UNITS[match[2]])
