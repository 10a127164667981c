"""Which ends of a sequence are errors, and what their clients are told."""

from __future__ import annotations

import pytest

from eventlm.engine.backend import AnswerDelta, CallPart
from eventlm.engine.request import AT_SHUTDOWN, BY_OPERATOR, BY_OWNER, FinishedOutput
from eventlm.server.errors import from_generation_error
from eventlm.text.choice_output import ChoiceOutput, generation_error, join_outputs
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


def test_deltas_of_backends_are_joined() -> None:
    parts = [
        AnswerDelta("a", 1, "x", [CallPart(0, "f", "")], [1], b'[{"token": "a"}]'),
        AnswerDelta("", 1, "y", [CallPart(0, "", "{"), CallPart(1, "g", "{")]),
        AnswerDelta("b", 2, "", [CallPart(1, "", "}"), CallPart(1, "h", "")], [2, 3], b'[{"token": "b"}, {}]'),
    ]
    outputs = [ChoiceOutput(0, part.text, part.token_ids, delta=part) for part in parts]
    calls = [CallPart(0, "f", "{"), CallPart(1, "g", "{}"), CallPart(1, "h", "")]
    joined = AnswerDelta("ab", 4, "xy", calls, [1, 2, 3], b'[{"token": "a"},{"token": "b"},{}]')
    assert join_outputs([*outputs, ChoiceOutput(0)]).delta == joined
    assert join_outputs([ChoiceOutput(0), outputs[0]]).delta == parts[0]
    assert join_outputs([ChoiceOutput(0), ChoiceOutput(0)]).delta is None


def test_log_probabilities_in_columns_are_joined() -> None:
    parts = [
        AnswerDelta(logprobs=b'{"tokens":["a"],"top_logprobs":null}'),
        AnswerDelta(),
        AnswerDelta(logprobs=b'{"tokens":["b"]}'),
    ]
    joined = join_outputs([ChoiceOutput(0, delta=part) for part in parts]).delta
    assert joined == AnswerDelta(logprobs=b'{"tokens":["a","b"],"top_logprobs":[]}')
