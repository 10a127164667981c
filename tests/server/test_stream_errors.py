"""Which error a stream of several choices ends with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventlm.engine.backend import BackendFailure
from eventlm.engine.request import FinishedOutput
from eventlm.server.stream_events import StreamEvents
from eventlm.text.choice_output import ChoiceOutput

_CANCELLED = FinishedOutput(0, "cancelled", 2, 0, detail="client")
_FAILED = FinishedOutput(1, "error", 2, 0, failure=BackendFailure("broken", "it ended"))


def _message(*ends: FinishedOutput) -> str:
    """The error that a client gets when all of these choices have ended before it reads, as after a reconnect."""
    replies: Any = SimpleNamespace(framing=SimpleNamespace(frame=None), begin=lambda _: [], events=lambda *_: [])
    generation: Any = SimpleNamespace(num_outputs=len(ends))
    events = StreamEvents(generation, replies, has_ids=False)
    events.take([ChoiceOutput(choice=end.index, finished=end) for end in ends])
    assert events.error is not None
    return events.error.envelope.error.message


@pytest.mark.parametrize("ends", [[_CANCELLED, _FAILED], [_FAILED, _CANCELLED]])
def test_a_stream_tells_what_failed_and_not_what_was_cancelled_because_of_it(ends: list[FinishedOutput]) -> None:
    assert "ended its answer too early" in _message(*ends)


def test_a_stream_that_was_cancelled_tells_that() -> None:
    assert "ended this request before it was complete" in _message(_CANCELLED)
