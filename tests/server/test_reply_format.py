"""How events are framed."""

from __future__ import annotations

import pytest
from msgspec import Struct

from eventlm.server.reply_format import LINES, NAMED_EVENTS, UNNAMED_EVENTS, Framing


class _Ping(Struct, tag_field="type", tag="ping.sent"):
    """An event."""


@pytest.mark.parametrize(
    ("framing", "expected"),
    [
        (UNNAMED_EVENTS, b'data: {"type":"ping.sent"}\n\n'),
        (NAMED_EVENTS, b'event: ping.sent\ndata: {"type":"ping.sent"}\n\n'),
        (LINES, b'{"type":"ping.sent"}\n'),
    ],
)
def test_framing(framing: Framing, expected: bytes) -> None:
    assert framing.frame(_Ping(), b'{"type":"ping.sent"}') == expected
