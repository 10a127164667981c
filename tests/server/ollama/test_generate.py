"""`/api/generate`: prompts as messages and as they are, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.ollama.clients import CREATED, assert_ollama_error, generate, lines

USER = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, USER),
        ({"system": "Be brief."}, f"<|im_start|>system\nBe brief.<|im_end|>\n{USER}"),
        ({"raw": True}, "<|bos|>hi"),
        ({"suffix": "", "template": "", "context": [], "images": [], "system": ""}, USER),
    ],
)
def test_the_prompt(server: RunningServer, fields: dict[str, Any], prompt: str) -> None:
    assert generate(server, **fields).status == 200
    assert server.context.tokenizer.decode(server.engine.requests[0].prompt_token_ids) == prompt


def test_a_model_without_a_template_continues(server: RunningServer) -> None:
    server.context.tokenizer.chat_template = None
    assert generate(server, stream=False).json()["response"] == "Hello, world"
    assert server.context.tokenizer.decode(server.engine.requests[0].prompt_token_ids) == "<|bos|>hi"


def test_the_lines_of_a_stream(start_with_ollama: Any) -> None:
    server, client = start_with_ollama(reasoning_parser="qwen3")
    server.engine.script = spell("<think>hm</think>Yes.", width=1000)
    assert lines(generate(server)) == [
        {"done": False, "response": "", "thinking": "hm"},
        {"done": False, "response": "Yes."},
        {"done": True, "done_reason": "stop", "response": "", "prompt_eval_count": 21, "eval_count": 21},
    ]
    whole = generate(server, stream=False).json()
    assert (whole["thinking"], whole["response"]) == ("hm", "Yes.")
    parts = list(client.generate(model="test", prompt="hi", stream=True))
    assert "".join(part.thinking or "" for part in parts) == "hm"
    assert "".join(part.response for part in parts) == "Yes."
    # As it is, there is nothing but text.
    assert generate(server, stream=False, raw=True).json()["response"] == "<think>hm</think>Yes."


@pytest.mark.parametrize("raw", [True, False])
def test_log_probabilities(server: RunningServer, raw: bool) -> None:
    fields = {"raw": raw, "logprobs": True, "top_logprobs": 1, "options": {"num_predict": 2}}
    expected = [
        {
            "token": token,
            "logprob": -ord(token) / 100,
            "bytes": [ord(token)],
            "top_logprobs": [{"token": " ", "logprob": -0.32, "bytes": [32]}],
        }
        for token in "He"
    ]
    assert generate(server, stream=False, **fields).json()["logprobs"] == expected
    first, second, last = lines(generate(server, **fields))
    assert [first["logprobs"], second["logprobs"]] == [[expected[0]], [expected[1]]]
    assert "logprobs" not in last
    assert generate(server, stream=False, logprobs=True).json()["logprobs"][0]["top_logprobs"] == []
    assert "logprobs" not in generate(server, stream=False, top_logprobs=1).json()


def test_log_probabilities_of_text_that_is_held_back(server: RunningServer) -> None:
    server.engine.script = spell("🙂")
    *parts, _ = lines(generate(server, raw=True, logprobs=True))
    assert [(part["response"], len(part["logprobs"])) for part in parts] == [("", 1), ("", 1), ("", 1), ("🙂", 1)]


@pytest.mark.parametrize("fields", [{}, {"prompt": ""}, {"prompt": None, "stream": False}, {"keep_alive": "5m"}])
def test_without_a_prompt_the_model_is_loaded(server: RunningServer, fields: dict[str, Any]) -> None:
    body = server.post("/api/generate", {"model": "test", **fields}).json()
    assert re.fullmatch(CREATED, body.pop("created_at"))
    assert body == {"model": "test", "response": "", "done": True, "done_reason": "load"}
    assert generate(server, prompt="", keep_alive=0).json()["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"suffix": "b"}, ("suffix",)),
        ({"template": "{{ .Prompt }}"}, ("template",)),
        ({"context": [1]}, ("context",)),
        ({"images": ["aGk="]}, ("images", "text only")),
        ({"raw": True, "system": "a"}, ("system", "raw")),
        ({"prompt": 1}, ("prompt",)),
        ({"prompt": "a" * 300}, ("context length",)),
        ({"prompt": "a" * 300, "raw": True}, ("the prompt",)),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_ollama_error(generate(server, **fields), 400, *words)
