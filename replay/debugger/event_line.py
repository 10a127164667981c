"""An event in one line: its tag and its fields, rows as counts."""

from __future__ import annotations

from typing import Any

from eventlm.events import Event
from eventlm.formatting import printable
from eventlm.replay.verify.divergence import as_object, shortened

_MAX_CHARS = 150
#: Longer lists are counted.
_MAX_LIST_CHARS = 40
_SHOWN_ELSEWHERE = ("t", "s", "ts", "c", "p")


def event_line(event: Event) -> str:
    """`launch replica=0 step=26 decodes=[3] num_tokens=3`, shortened. A list that is long is its number of entries."""
    found = as_object(event)
    fields = [f"{name}={_value(value)}" for name, value in found.items() if name not in _SHOWN_ELSEWHERE]
    cause = [f"(because of {event.c})"] if event.c and event.c != event.s else []
    return shortened(" ".join([str(found["t"]), *fields, *cause]), _MAX_CHARS)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        text = str(value).replace(" ", "")
        return text if len(text) <= _MAX_LIST_CHARS else f"[{len(value):,} entries]"
    text = printable(str(value))
    return text if " " not in text and text else repr(value)
