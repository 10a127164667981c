"""`/invocations` answers as the endpoint that its body is for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt": None, "stream": True}),
        ("/v1/completions", {"prompt": "hi", "stream": True}),
    ],
)
def test_it_answers_as_the_endpoint_for_the_body(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    replies = [server.post(each, {"model": "test", **fields}) for each in ("/invocations", path)]
    assert [reply.status for reply in replies] == [200, 200]
    own, direct = replies
    assert own.headers["content-type"] == direct.headers["content-type"]
    if "stream" in fields:
        assert own.data.count(b"data: ") == direct.data.count(b"data: ") > 3
        return
    unlike = ("id", "created")
    assert {k: v for k, v in own.json().items() if k not in unlike} == {
        k: v for k, v in direct.json().items() if k not in unlike
    }


def test_without_a_model_it_is_the_one_that_is_served(server: RunningServer) -> None:
    assert server.post("/invocations", {"messages": MESSAGES}).json()["model"] == "test"
    reply = server.post("/invocations", {"prompt": "hi", "model": "other"})
    assert_error(reply, 404, INVALID, param="model", code="model_not_found")


@pytest.mark.parametrize(("body", "message"), [({}, "'messages'"), ({"text_1": "a", "text_2": "b"}, "'prompt'")])
def test_any_other_body(server: RunningServer, body: dict[str, Any], message: str) -> None:
    assert_error(server.post("/invocations", body), 400, INVALID, code="invalid_value", message=message)


def test_errors_are_those_of_the_endpoint(server: RunningServer) -> None:
    reply = server.post("/invocations", {"messages": MESSAGES, "temperature": 9})
    assert_error(reply, 400, INVALID, param="temperature", code="invalid_value")
    assert_error(server.post("/invocations", b"[]"), 400, INVALID, code="invalid_type")
