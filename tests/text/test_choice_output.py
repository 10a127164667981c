"""Which ends of a sequence are errors, and what their clients are told."""

from __future__ import annotations

import pytest

from eventlm.engine.request import AT_SHUTDOWN, BY_OPERATOR, BY_OWNER, FinishedOutput
from eventlm.server.errors import from_generation_error
from eventlm.text.choice_output import generation_error
from eventlm.types import FinishReason


@pytest.mark.parametrize("reason", ["eos", "stop_token", "stop_string", "length", "tool_calls", "complete"])
def test_ordinary_ends(reason: FinishReason) -> None:
    assert generation_error(FinishedOutput(0, reason, 3, 0)) is None


@pytest.mark.parametrize(
    ("reason", "detail", "status", "code", "retry"),
    [
        ("cancelled", BY_OWNER, 499, "cancelled", False),
        ("cancelled", BY_OPERATOR, 503, "aborted", False),
        ("cancelled", AT_SHUTDOWN, 503, None, True),
        ("front_end_lost", "", 503, None, True),
        ("deadline", "", 504, "deadline_exceeded", False),
        ("error", "nothing can match it", 400, "invalid_value", True),
        ("error", "", 500, None, False),
    ],
)
def test_errors_and_their_status(reason: FinishReason, detail: str, status: int, code: str | None, retry: bool) -> None:
    error = generation_error(FinishedOutput(0, reason, 3, 0, detail=detail))
    assert error is not None
    assert (error.reason, error.detail) == (reason, detail)
    reply = from_generation_error(error)
    assert (reply.status, reply.envelope.error.code) == (status, code)
    assert ("x-should-retry" not in reply.headers) == retry
