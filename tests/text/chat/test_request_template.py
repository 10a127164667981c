"""Chat templates that requests bring: rendered where the server allows them, with what is wrong named."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from eventlm.text.chat.request_template import RequestTemplates
from tests.processes import children
from tests.server.conftest import INVALID, RunningServer, assert_error

SOURCE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}|{{ message.content }}]{% endfor %}"
    "{{ tone }}{% if add_generation_prompt %}[assistant|{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def trusting(start_server: Any) -> RunningServer:
    server: RunningServer = start_server(trust_request_chat_template=True)
    return server


def prompt(server: RunningServer) -> str:
    return b"".join(map(server.context.tokenizer.raw_token_bytes, server.engine.requests[-1].prompt_token_ids)).decode()


def test_a_template_in_place_of_the_models(trusting: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{trusting.url}/v1", api_key="none", max_retries=0) as client:
        for extra, expected in (
            ({}, "<|bos|>[user|hi][assistant|"),
            ({"chat_template_kwargs": {"tone": "loud"}}, "<|bos|>[user|hi]loud[assistant|"),
            ({"add_generation_prompt": False}, "<|bos|>[user|hi]"),
            ({"truncate_prompt_tokens": 4}, "ant|"),
        ):
            client.chat.completions.create(
                model="test", messages=MESSAGES, extra_body={"chat_template": SOURCE, **extra}
            )
            assert prompt(trusting) == expected
    messages = [*MESSAGES, {"role": "assistant", "content": "So"}]
    assert trusting.chat(messages=messages, chat_template=SOURCE, continue_final_message=True).status == 200
    assert prompt(trusting) == "<|bos|>[user|hi][assistant|So"
    # A model without a template takes one, and /tokenize counts the same tokens.
    trusting.context.tokenizer.chat_template = None
    assert trusting.chat(chat_template=SOURCE).status == 200
    counted = trusting.post("/tokenize", {"messages": MESSAGES, "chat_template": SOURCE}).json()
    assert counted["tokens"] == trusting.engine.requests[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("source", "fields", "param", "message"),
    [
        ("{% if", {}, "chat_template", "it does not compile: line 1"),
        ("", {}, "chat_template", "it must not be empty"),
        ("x" * 70_000, {}, "chat_template", "at most 65536 characters"),
        ("{{ raise_exception('only system') }}", {}, "chat_template", "messages: only system."),
        ("{{ raise_exception('Only system.') }}", {}, "chat_template", "messages: Only system."),
        ("{{ messages[7].content + 1 }}", {}, "chat_template", "cannot render these messages"),
        ("-", {"messages": [{"role": "ipython", "content": "x"}]}, "messages[0].role", "leaves out messages"),
        ("-", {"documents": [{"text": "d"}]}, "documents", "does not read them"),
        ("{{ 'x' * 10 ** 11 }}", {}, "chat_template", "too much memory"),
        ("-", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "reserved"),
    ],
)
def test_what_is_wrong_is_named(
    trusting: RunningServer, source: str, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = trusting.chat(chat_template=source, **fields)
    assert_error(reply, 400, INVALID, param, "invalid_value", message=message)
    assert ".." not in reply.json()["error"]["message"]
    assert not trusting.engine.requests


def test_it_takes_a_flag(server: RunningServer) -> None:
    reply = server.chat(chat_template=SOURCE)
    message = "start the server with --trust-request-chat-template"
    assert_error(reply, 400, INVALID, "chat_template", "invalid_value", message=message)
    assert server.chat(chat_template=None).status == 200


def test_one_that_takes_too_long_is_ended_and_leaves_nothing(
    trusting: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    templates = RequestTemplates(trusting.context.system.processes, timeout_seconds=0.05)
    monkeypatch.setattr(trusting.context.requests, "_templates", templates)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = children(os.getpid())
    reply = trusting.chat(chat_template=endless)
    assert_error(reply, 400, INVALID, "chat_template", "invalid_value", message="it takes too long")
    assert children(os.getpid()) == before


async def test_so_many_may_wait(trusting: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.text.chat.request_template.MAX_WAITING", 0)
    body = {"model": "test", "messages": MESSAGES, "chat_template": "{{ messages[0].content }}"}
    replies = await asyncio.gather(
        *(asyncio.to_thread(trusting.post, "/v1/chat/completions", json.dumps(body).encode()) for _ in range(6))
    )
    statuses = [reply.status for reply in replies]
    assert statuses.count(200) >= 2
    assert {429} >= {*statuses} - {200}
    assert all(reply.headers["retry-after"] for reply in replies if reply.status == 429)
