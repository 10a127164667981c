from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.tool_calls import MESSAGES, TOOLS


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "hé"}, [104, 195, 169]),
        ({"content": ""}, []),
        ({"content": "a", "add_special": True}, [256, 97]),
        ({"content": "<|eos|>"}, [257]),
        ({"content": "a", "parse_special": False}, [97]),
        (
            {"content": "é🙂a", "with_pieces": True},
            [{"id": byte, "piece": chr(byte) if byte < 128 else [byte]} for byte in "é🙂a".encode()],
        ),
    ],
)
def test_texts(server: RunningServer, prefix: str, fields: dict[str, Any], tokens: list[Any]) -> None:
    assert server.post(f"{prefix}/tokenize", fields).json() == {"tokens": tokens}


def test_and_back(server: RunningServer) -> None:
    assert server.post("/detokenize", {"tokens": [104, 105]}).json()["content"] == "hi"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"content": 1}, "content", "invalid_type"),
        ({"content": "a<|eos|>", "parse_special": False}, "parse_special", "invalid_value"),
        ({"content": "a", "with_pieces": "yes"}, "with_pieces", "invalid_type"),
    ],
)
def test_what_is_wrong(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    assert_error(server.post("/tokenize", fields), 400, INVALID, param, code)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}])
def test_the_prompt_of_a_conversation_is_that_of_a_chat(server: RunningServer, fields: dict[str, Any]) -> None:
    server.engine.max_model_len = 4096
    prompt = server.post("/apply-template", {"messages": MESSAGES, **fields}).json()["prompt"]
    server.chat(messages=MESSAGES, **fields)
    assert server.context.tokenizer.encode(prompt, add_special_tokens=False) == (
        server.engine.requests[0].prompt_token_ids
    )


def test_conversations_that_are_wrong(server: RunningServer) -> None:
    post = server.post
    assert_error(post("/apply-template", {}), 400, INVALID, "messages", "missing_required_parameter")
    assert_error(post("/apply-template", {"messages": []}), 400, INVALID, "messages", "invalid_value")
    for path, body in (("/apply-template", {"messages": MESSAGES}), ("/tokenize", {"content": "a"})):
        assert_error(post(path, {**body, "model": "x"}), 404, INVALID, "model", "model_not_found")
        server.engine.state = "loading"
        assert post(path, body).status == 503
        server.engine.state = "ready"
