"""The header `traceparent` of W3C Trace Context: which span of the caller a request belongs to."""

from __future__ import annotations

import re

from eventlm.telemetry.spans import SpanContext

#: Later versions may add fields after the flags; version ff is forbidden.
_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def parse_traceparent(header: str) -> SpanContext | None:
    """The caller's span; None if the header is not valid, which the standard says to treat as absent."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or (match[1] == "00" and match[5]) or not int(match[2], 16) or not int(match[3], 16):
        return None
    return SpanContext(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))
