"""A server whose model other servers run, with what they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, CallPart
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from tests.server.conftest import RunningServer

USAGE = {"prompt": 7, "completion": 5, "cached": 3, "reasoning": 2}
LOGPROBS = [
    {
        "token": "Hel",
        "logprob": -0.5,
        "bytes": [72, 101, 108],
        "top_logprobs": [{"token": "By", "logprob": -1.5, "bytes": None}],
    },
    {"token": "lo", "logprob": -0.25, "bytes": None, "top_logprobs": []},
]
#: Reasoning, a text and two calls, in pieces.
ANSWER: list[Any] = [
    AnswerDelta("", 1, reasoning="Let me "),
    AnswerDelta("", 1, reasoning="see."),
    AnswerDelta("Well", 1),
    AnswerDelta("", 1, calls=[CallPart(0, "add", "")]),
    AnswerDelta("", 1, calls=[CallPart(0, "", '{"a": 1}'), CallPart(1, "sub", "{}")]),
    AnswerEnd("tool_calls", AnswerUsage(**USAGE)),
]
CALLS = [("add", '{"a": 1}'), ("sub", "{}")]


@pytest.fixture
def gateway(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(tokenizer=PieceTokenizer(), forwards=True)
    server.engine.max_model_len = 4096
    return server


def forwarded(server: RunningServer, index: int = -1) -> Any:
    """The body that the last request forwards, or another."""
    request = server.engine.requests[index].forwarded
    assert request is not None
    return msgspec.json.decode(request.body)
