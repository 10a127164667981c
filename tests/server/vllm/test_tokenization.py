"""Tokenize and detokenize over HTTP, against the tokenizers library and what the engine is given of a chat."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from eventlm.text.tokenizer import CheckpointTokenizer
from tests.server.checkpoints import byte_fallback, byte_level
from tests.server.conftest import INVALID, RunningServer, assert_error

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 🙂?"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_and_back(server: RunningServer, prefix: str) -> None:
    reply = server.post(f"{prefix}/tokenize", {"model": "test", "prompt": "hé"})
    assert reply.status == 200
    assert reply.json() == {"count": 4, "max_model_len": 256, "tokens": [256, 104, 195, 169], "token_strs": None}
    back = server.post(f"{prefix}/detokenize", {"model": "test", "tokens": reply.json()["tokens"]})
    assert (back.status, back.json()) == (200, {"prompt": "<|bos|>hé", "content": "<|bos|>hé"})


def test_options(server: RunningServer) -> None:
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    assert server.post("/tokenize", body).json() == {
        "count": 2,
        "max_model_len": 256,
        "tokens": [104, 105],
        "token_strs": ["h", "i"],
    }


@pytest.mark.parametrize(
    "fields", [{}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}}, {"tools": [TOOL]}]
)
def test_a_conversation_has_the_tokens_that_a_chat_gives_the_engine(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    server.engine.max_model_len = 1024
    reply = server.post("/tokenize", {"messages": MESSAGES, **fields})
    server.chat(messages=MESSAGES, **fields)
    assert reply.json()["tokens"] == server.engine.requests[-1].prompt_token_ids
    assert reply.json()["count"] == len(reply.json()["tokens"])


def test_a_long_text_goes_through_a_thread(server: RunningServer) -> None:
    text = "größer " * 400
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<|bos|>" + text


def test_the_words_of_a_long_text_are_found_in_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.context.tokenizer
    spell, threads = tokenizer.token_strings, []

    def note_thread(token_ids: Sequence[int]) -> list[str]:
        threads.append(threading.current_thread().name.partition("_")[0])
        return spell(token_ids)

    monkeypatch.setattr(tokenizer, "token_strings", note_thread)
    text = "x" * 4096
    found = server.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}).json()
    assert found["token_strs"] == list(text)
    assert threads == ["tokenizer"]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 1}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "invalid_value"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "a b", "content": ""}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"messages": MESSAGES, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]", "invalid_type"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [1024]}, "tokens[0]", "invalid_value"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, path: str, body: dict[str, Any], param: str, code: str) -> None:
    assert_error(server.post(path, body), 400, INVALID, param, code)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_and_a_server_that_loads(server: RunningServer, path: str) -> None:
    body = {"model": "other", "prompt": "a", "tokens": [1]}
    assert_error(server.post(path, body), 404, INVALID, "model", "model_not_found")
    server.engine.state = "loading"
    assert server.post(path, body).status == 503


def test_a_key_is_needed(start_server: Any) -> None:
    server = start_server(api_key="secret")
    assert_error(server.post("/v1/tokenize", {"prompt": "a"}), 401, INVALID)
    assert server.post("/v1/tokenize", {"prompt": "a"}, {"Authorization": "Bearer secret"}).status == 200


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["The quick brown fox", " two  spaces", "naïve 🙂 日本", ""])
def test_a_checkpoints_tokens_are_those_of_the_library(tmp_path: Path, make: Any, text: str) -> None:
    folder = make(tmp_path)
    tokenizer, library = CheckpointTokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    encoding = library.encode(text, add_special_tokens=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.token_strings(token_ids) == encoding.tokens
    assert tokenizer.decode(token_ids) == library.decode(encoding.ids, skip_special_tokens=False)
    if "🙂" not in text:  # the small byte-fallback vocabulary has them as bytes
        assert tokenizer.decode(token_ids) == text


def test_special_tokens_belong_to_the_text(tmp_path: Path) -> None:
    tokenizer = CheckpointTokenizer(byte_level(tmp_path))
    token_ids = tokenizer.encode("a<|im_end|>", add_special_tokens=True)
    assert tokenizer.decode(token_ids) == "<s>a<|im_end|>"
    assert tokenizer.token_strings([*token_ids, 10**6]) == ["<s>", "a", "<|im_end|>", ""]
