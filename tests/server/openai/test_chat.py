"""Chat completions: OpenAI's shapes, streamed and not, by raw HTTP and by the openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import EventLMError
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEXT = "naïve 🙂 text, 日本語!"


@pytest.fixture
def client(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole_reply(server: RunningServer) -> None:
    reply = server.chat().json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert isinstance(reply.pop("created"), int)
    assert reply == {
        "object": "chat.completion",
        "model": "test",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 12,
            "total_tokens": 33,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "system_fingerprint": None,
    }


def test_usage_in_every_chunk_of_a_stream(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = server.chat(stream=True, n=2, stream_options=options).events()
    whole = server.chat(n=2).json()["usage"]
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == whole["completion_tokens"]
    for index in (0, 1):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert counts[-1] * 2 == whole["completion_tokens"]
        assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
        assert all(usage["total_tokens"] == whole["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    *chunks, done = server.chat(stream=True, stream_options={"continuous_usage_stats": True}).events()
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("include_usage", [True, False])
def test_stream(server: RunningServer, include_usage: bool) -> None:
    server.engine.script = spell("ok", width=1)
    reply = server.chat(stream=True, stream_options={"include_usage": include_usage})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = reply.events()
    assert done == "[DONE]"
    common = {"object": "chat.completion.chunk", "model": "test", "system_fingerprint": None}
    if include_usage:
        common["usage"] = None
        last = chunks.pop()
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (21, 2)
    assert len({(chunk.pop("id"), chunk.pop("created")) for chunk in chunks}) == 1
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "o"}, None),
        ({"content": "k"}, None),
        ({}, "stop"),
    ]
    assert chunks == [
        {
            **common,
            "choices": [
                {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
                | ({"stop_reason": None} if reason else {})
            ],
        }
        for delta, reason in deltas
    ]


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("stop", [None, "text", ["语", "日本"], "🙂 t", "!", "not there"])
def test_streamed_text_is_the_whole_text(server: RunningServer, client: openai.OpenAI, stop: Any, width: int) -> None:
    server.engine.script = spell(TEXT, width=width)
    fields: Any = {"model": "test", "messages": MESSAGES, "stop": stop}
    whole = client.chat.completions.create(**fields)
    stream = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    stops = [stop] if isinstance(stop, str) else stop or []
    expected = min((TEXT[: TEXT.find(each)] for each in stops if each in TEXT), default=TEXT)
    deltas = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert "".join(delta or "" for delta in deltas) == whole.choices[0].message.content == expected
    assert not any("�" in delta for delta in deltas if delta)
    assert stream[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in stream if c.choices and c.choices[0].finish_reason] == ["stop"]
    # The stop string is part of the usage up to the token that completes it.
    assert whole.usage is not None
    found = [each for each in stops if each in TEXT]
    if found:
        needed = len((expected + found[0]).encode())
        assert whole.usage.completion_tokens == needed
        assert [end[2:] for end in server.engine.text_ends] == [(needed, "stop")] * 2
    else:
        assert whole.usage.completion_tokens == len(TEXT.encode())
        assert [end[3] for end in server.engine.text_ends] == [""] * (2 if stops else 0)


def test_several_choices(server: RunningServer, client: openai.OpenAI) -> None:
    texts = ["one", "zwei 🙂", "trois"]
    server.engine.script = lambda request, index: [[byte] for byte in texts[index].encode()]
    whole = client.chat.completions.create(model="test", messages=MESSAGES, n=3)
    assert [choice.message.content for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 21
    assert whole.usage.completion_tokens == sum(len(text.encode()) for text in texts)
    streamed = ["", "", ""]
    first: dict[int, Any] = {}
    for chunk in client.chat.completions.create(model="test", messages=MESSAGES, n=3, stream=True):
        [choice] = chunk.choices
        first.setdefault(choice.index, choice.delta.role)
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert first == {0: "assistant", 1: "assistant", 2: "assistant"}


def test_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="test", messages=MESSAGES, max_completion_tokens=5, max_tokens=9)
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "length"


def test_a_text_cut_inside_a_character_ends_in_one_replacement(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = spell("ab🙂")
    for stop in (None, "zzz"):
        reply = client.chat.completions.create(model="test", messages=MESSAGES, max_tokens=4, stop=stop)
        assert reply.choices[0].message.content == "ab�"


def test_end_tokens_give_no_text(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = lambda request, index: [[*b"hi"], [257]]
    reply = client.chat.completions.create(model="test", messages=MESSAGES)
    assert reply.choices[0].message.content == "hi"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    server.engine.script = lambda request, index: [[*b"hi"], [*b"!"]]
    server.engine.script_end = "stop_token"
    reply = client.chat.completions.create(model="test", messages=MESSAGES, extra_body={"stop_token_ids": [33]})
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hi", "stop")


def test_what_the_engine_gets(server: RunningServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="test",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        temperature=0.5, top_p=0.9, seed=-2, max_tokens=7, stop=["x", "y"], n=2, user="somebody",
        extra_body={
            "top_k": 40, "ignore_eos": True, "stop_token_ids": [5], "priority": -3, "deadline_ms": 250,
            "slo": {"ttft_ms": 100, "tpot_ms": 20}, "drop_if_late": True, "cache_salt": "s",
        },
    )  # fmt: skip
    [request] = server.engine.requests
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == server.context.tokenizer.encode(text, add_special_tokens=False)
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 40, 7)
    assert (params.stop, params.stop_token_ids, params.eos_token_ids) == (["x", "y"], [5], (257,))
    assert params.ignore_eos
    assert (request.n, params.seed, request.scheduling.priority, request.scheduling.has_text_ends) == (2, -2, -3, True)
    assert (request.scheduling.deadline_ns, request.scheduling.slo_ttft_ns, request.scheduling.slo_tpot_ns) == (
        250_000_000,
        100_000_000,
        20_000_000,
    )
    assert (request.scheduling.drop_if_late, request.cache_salt, request.scheduling.offline) == (True, "s", False)
    assert 0 < request.scheduling.received_ns <= request.scheduling.ready_ns


def test_defaults(server: RunningServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="test", messages=MESSAGES)
    client.chat.completions.create(model="test", messages=MESSAGES, temperature=1e-9, seed=-1, extra_body={"top_k": -1})
    plain, greedy = server.engine.requests
    assert plain.sampling.max_tokens == 256 - 21
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.top_k) == (1.0, 1.0, 0)
    assert (plain.sampling.seed, plain.n, plain.scheduling.has_text_ends) == (None, 1, False)
    assert (greedy.sampling.temperature, greedy.sampling.top_k, greedy.sampling.seed) == (0.0, 0, None)


def test_template_variables_and_errors(server: RunningServer) -> None:
    from eventlm.text.chat_template import ChatTemplate

    server.context.tokenizer.chat_template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}", {})
    error = server.chat().json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert error["message"].endswith(" Roles must alternate.")
    source = "{{ style }}{% if add_generation_prompt %}+{% endif %}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    server.chat(chat_template_kwargs={"style": "loud"})
    server.chat(chat_template_kwargs={"style": "loud"}, add_generation_prompt=False)
    assert [bytes(request.prompt_token_ids) for request in server.engine.requests] == [b"loud+", b"loud"]
    assert "empty" in server.chat(add_generation_prompt=False).json()["error"]["message"]
    server.context.tokenizer.chat_template = None
    assert_error(server.chat(), 400, INVALID, "messages", "no_chat_template", "use /v1/completions")


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineUnavailableError("all workers are lost"), "server_error"), (EventLMError("x"), "server_error")],
)
def test_an_error_inside_a_stream(server: RunningServer, error: EventLMError, status: str) -> None:
    server.engine.script_end = None
    server.engine.step_seconds = 0.005
    server.engine.max_model_len = 1_000_000
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="test", messages=MESSAGES, stream=True)
    chunks = iter(stream)
    assert next(chunks).choices[0].delta.role == "assistant"
    server.loop.call_soon_threadsafe(server.engine.fail, error)
    with pytest.raises(openai.APIError) as caught:
        list(chunks)
    assert caught.value.type == status
    client.close()


def test_the_error_event_is_followed_by_done(server: RunningServer) -> None:
    server.engine.script_end = "error"
    *_, error, done = server.chat(stream=True).events()
    assert error["error"]["type"] == "server_error"
    assert done == "[DONE]"


async def test_async_client_with_many_streams(server: RunningServer) -> None:
    import asyncio

    server.engine.script = spell(TEXT)

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="test", messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        texts = await asyncio.gather(*(one(client) for _ in range(32)))
        assert [model.id async for model in client.models.list()] == ["test", "org/test"]
        assert (await client.models.retrieve("org/test")).owned_by == "eventlm"
    assert texts == [TEXT] * 32


CONTINUED: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


@pytest.mark.parametrize(
    ("fields", "role", "content"),
    [
        ({"messages": CONTINUED, "continue_final_message": True}, "assistant", "Well, Hello, world"),
        ({"messages": CONTINUED, "add_generation_prompt": False}, "assistant", "Well, Hello, world"),
        ({"messages": CONTINUED[:1], "add_generation_prompt": False}, "user", "hiHello, world"),
        # A new message of another role than the last one's.
        ({"messages": CONTINUED[:1]}, "assistant", "Hello, world"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]}, "assistant", "Hello, world"),
        ({"messages": CONTINUED}, "assistant", "Well, Hello, world"),
    ],
)
def test_echo(server: RunningServer, fields: dict[str, Any], role: str, content: str) -> None:
    """vLLM's `echo`: the last message comes first, if it has the reply's role."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    message = server.chat(echo=True, n=2, **fields).json()["choices"][1]["message"]
    assert (message["role"], message["content"]) == (role, content)
    chunks = server.chat(echo=True, stream=True, stream_options=options, **fields).events()[:-2]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": role, "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == content
    echoed = content.removesuffix("Hello, world")
    assert (deltas[1] == {"content": echoed}) == bool(echoed)
    assert all(chunk["usage"] for chunk in chunks)
    plain = server.chat(**fields).json()["choices"][0]["message"]
    assert (plain["role"], plain["content"]) == (role, "Hello, world")
