from __future__ import annotations

import math
from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"content": "a"}, [[256, 97]]),
        ({"input": "a"}, [[256, 97]]),
        ({"content": [97, "b"]}, [[97, 98]]),
        ({"content": ["a", [98], {"prompt_string": "c"}]}, [[256, 97], [98], [256, 99]]),
    ],
)
def test_inputs(server: RunningServer, path: str, body: dict[str, Any], prompts: list[list[int]]) -> None:
    reply = server.post(path, body).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == prompts
    assert [each["index"] for each in reply] == list(range(len(prompts)))
    for each in reply:
        [vector] = each["embedding"]
        assert (len(vector), math.hypot(*vector)) == (16, pytest.approx(1))


def test_a_vector_as_the_model_made_it(server: RunningServer) -> None:
    [each] = server.post("/embedding", {"content": "a", "embd_normalize": -1}).json()
    assert each["embedding"][0][:2] == [2, 256 + 97]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "content", "missing_required_parameter"),
        ({"content": "a", "input": "b"}, "input", "invalid_value"),
        ({"content": []}, "content", "invalid_value"),
        ({"input": ["a", [1024]]}, "input[1][0]", "invalid_value"),
        ({"content": "a" * 300}, "content", "context_length_exceeded"),
        ({"content": "a", "embd_normalize": 1}, "embd_normalize", "invalid_value"),
        ({"content": "a", "encoding_format": "base64"}, "encoding_format", "invalid_value"),
    ],
)
def test_what_is_wrong(server: RunningServer, body: dict[str, Any], param: str, code: str) -> None:
    reply = server.post("/embedding", body)
    assert reply.status == 400, reply.data
    assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (param, code)


def test_the_values_of_embd_normalize_are_named(server: RunningServer) -> None:
    message = server.post("/embedding", {"content": "a", "embd_normalize": 5}).json()["error"]["message"]
    assert message == "Invalid value for 'embd_normalize': supported values are -1, 2."


def test_another_model(server: RunningServer) -> None:
    assert_error(server.post("/embedding", {"content": "a", "model": "x"}), 404, INVALID, "model", "model_not_found")
