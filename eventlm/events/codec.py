"""Events to lines and back, and the hash chain that ties the lines together.

A line is `{"t":tag,"s":..,"ts":..,"c":..,<own fields>,"h":"<16 hex>"}` and a newline, where
`h = xxh3_64(previous h || bytes of the line before ',"h":"')`. The first line's previous h is empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import msgspec
import xxhash

from eventlm.events import DECISIONS, FACTS, MARKERS
from eventlm.events.base import Event

HASH_MARK = b',"h":"'
#: Length of `,"h":"<16 hex>"}`, the end of every line before its newline.
SUFFIX_BYTES = len(HASH_MARK) + 16 + 2

#: Raised by decoding bytes that are not an event: invalid JSON or UTF-8, too deep nesting, or fields that do not fit.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: Tags of the lines that are facts, and of those that are decisions.
FACT_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in FACTS)
DECISION_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in DECISIONS)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type=Union[FACTS + DECISIONS + MARKERS])  # noqa: UP007


class SplitLine(NamedTuple):
    """A line of a trace: the bytes that are hashed, and the hash it claims."""

    body: bytes
    claimed_h: str


def encode_body(event: Event) -> bytes:
    """The event's line without its closing hash: what is hashed, compared by a replay and shipped to a worker."""
    return _encoder.encode(event)[:-1]


def decode_body(body: bytes) -> Event:
    """The event of a line's body.

    Raises one of UNREADABLE, among them msgspec.ValidationError for an unknown tag or a field that does not fit.
    """
    event: Event = _decoder.decode(body + b"}")
    return event


def chain(previous_h: str, body: bytes) -> str:
    """The 16 hex digits that close a line with this body, given those of the line before ('' for the first)."""
    return xxhash.xxh3_64_hexdigest(previous_h.encode() + body)


def close_line(body: bytes, h: str) -> bytes:
    """The whole line, newline included."""
    return b'%b,"h":"%b"}\n' % (body, h.encode())


def split_line(line: bytes) -> SplitLine | None:
    """Take a complete line (without its newline) apart; None if it does not end as a line must."""
    body, suffix = line[:-SUFFIX_BYTES], line[-SUFFIX_BYTES:]
    if len(suffix) != SUFFIX_BYTES or not suffix.startswith(HASH_MARK) or not suffix.endswith(b'"}'):
        return None
    return SplitLine(body, suffix[len(HASH_MARK) : -2].decode("ascii", errors="replace"))
