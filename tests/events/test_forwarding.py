"""Events of forwarded requests on the wire."""

from __future__ import annotations

import pytest

from eventlm.events import (
    BackendDown,
    BackendState,
    BackendUp,
    Event,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    RetrySet,
    Streamed,
    Withdrawn,
)
from eventlm.events.codec import decode_body, encode_body


@pytest.mark.parametrize(
    ("event", "tag"),
    [
        (BackendUp(s=1, replica=0, epoch=1, name="host:8000", max_concurrency=4), "backend_up"),
        (BackendDown(s=1, replica=0, epoch=1, reason="drained"), "backend_down"),
        (BackendState(s=1, replica=0, epoch=1, waiting=3), "backend_state"),
        (Streamed(s=1, rows=[(1, 0, 2, 7)]), "streamed"),
        (
            ForwardEnded(s=1, request=1, index=0, attempt=1, reason="stop", num_tokens=3, cached_tokens=16),
            "forward_ended",
        ),
        (ForwardFailed(s=1, request=1, index=0, attempt=1, kind="overloaded", status=429), "forward_failed"),
        (Forwarded(s=1, request=1, index=0, replica=0, attempt=1, running=1, limit=8), "forward"),
        (Relayed(s=1, num_tokens=7, dropped=[1]), "relay"),
        (RetrySet(s=1, request=1, index=0, replica=0, attempt=1, due_ns=9), "retry"),
        (Withdrawn(s=1, request=1, index=0, replica=0, attempt=1), "withdraw"),
    ],
)
def test_they_come_back_as_they_went(event: Event, tag: str) -> None:
    body = encode_body(event)
    assert f'"t":"{tag}"'.encode() in body
    assert decode_body(body) == event
