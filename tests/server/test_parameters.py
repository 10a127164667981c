"""Each parameter of a request through the openai client, whose typed objects parse the replies."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from eventlm.engine.request import Request
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    """A chat that is not streamed, checked strictly against the client's types."""
    reply = client.chat.completions.create(model="test", messages=MESSAGES, **fields)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    return reply


def prompt_text(server: RunningServer) -> str:
    return b"".join(map(server.context.tokenizer.raw_token_bytes, server.engine.requests[-1].prompt_token_ids)).decode()


def test_user_and_metadata_change_nothing(server: RunningServer, client: openai.OpenAI) -> None:
    metadata = {f"key {number}": "v" * 512 for number in range(16)}
    plain = chat(client, seed=1)
    marked = chat(client, seed=1, user="somebody", metadata=metadata, safety_identifier="s")
    assert marked.choices == plain.choices
    client.completions.create(model="test", prompt="hi", user="somebody", extra_body={"metadata": metadata})
    first, second, _ = (without_times(request) for request in server.engine.requests)
    assert first == second
    with pytest.raises(openai.BadRequestError, match="at most 16 pairs") as caught:
        chat(client, metadata={**metadata, "one more": ""})
    assert (caught.value.param, caught.value.code) == ("metadata", "invalid_value")
    for name, value in (("secret" * 11, ""), ("k", "secret" * 100)):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, metadata={name: value})
        assert "secret" not in str(caught.value)


def test_what_is_taken_and_changes_nothing(server: RunningServer, client: openai.OpenAI) -> None:
    """As vLLM has it: the page of the API says so of each."""
    prediction: Any = {"type": "content", "content": "Hello, world"}
    plain = chat(client, seed=1)
    for fields in ({"store": True}, {"store": False}, {"prediction": prediction}):
        assert chat(client, seed=1, **fields).choices == plain.choices
    assert chat(client, seed=1, extra_body={"mm_processor_kwargs": {"num_crops": 4}}).choices == plain.choices
    assert len({repr(without_times(each)) for each in server.engine.requests}) == 1


def without_times(request: Request) -> Request:
    """The request without its times."""
    return request.with_scheduling(received_ns=0, ready_ns=0)


def test_max_completion_tokens_goes_before_max_tokens(server: RunningServer, client: openai.OpenAI) -> None:
    for fields, expected in (({"max_completion_tokens": 3, "max_tokens": 7}, 3), ({"max_tokens": 7}, 7)):
        reply = chat(client, **fields)
        assert reply.usage is not None
        assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (expected, "length")


def test_stream_options(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="test", prompt=["a", "b"], stream=True, stream_options=options))
    counts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        assert chunk.usage is not None
        counts[chunk.choices[0].index].append(chunk.usage.completion_tokens)
        assert chunk.usage.prompt_tokens == 2
    assert counts == {0: [*range(1, 13), 12], 1: [*range(1, 13), 12]}
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 24)
    stream = client.chat.completions.create(
        model="test", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *inner, last = list(stream)
    assert [chunk.usage for chunk in inner] == [None] * len(inner)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12


def test_return_token_ids(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.script = spell("Hé🙂!", width=2)
    ids = [*"Hé🙂!".encode()]
    extra = {"return_token_ids": True}
    whole = chat(client, n=2, extra_body=extra)
    expected = server.engine.requests[-1].prompt_token_ids
    assert (whole.model_extra or {})["prompt_token_ids"] == expected
    assert [(choice.model_extra or {})["token_ids"] for choice in whole.choices] == [ids, ids]
    streamed: list[list[int]] = [[], []]
    prompts = []
    for chunk in client.chat.completions.create(model="test", messages=MESSAGES, n=2, stream=True, extra_body=extra):
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        [part] = chunk.choices
        streamed[part.index] += (part.model_extra or {}).get("token_ids", [])
        prompts += [found] if (found := (chunk.model_extra or {}).get("prompt_token_ids")) else []
    assert streamed == [ids, ids]
    assert prompts == [expected] * 2
    for fields, found in (({}, [[*b"hi"], ids]), ({"stop": "🙂"}, [[*b"hi"], ids[:-1]])):
        plain = client.completions.create(model="test", prompt=[*b"hi"], extra_body=extra, **fields)
        extras = plain.choices[0].model_extra or {}
        assert [extras["prompt_token_ids"], extras["token_ids"]] == found
    # Text that is held back does not hold its tokens back. As in vLLM, all chunks have what is asked for.
    events = server.complete(prompt=[*b"hi"], stop="never", stream=True, return_token_ids=True, logprobs=0).events()
    assert [len(event["choices"][0]["token_ids"]) for event in events[:-1]] == [0, 2, 2, 2, 2, 0]
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events[:-1]] == [0, 2, 2, 2, 2, 0]
    assert server.chat().json()["prompt_token_ids"] is None
    for reply in (server.chat().json(), server.complete().json()):
        assert reply["choices"][0]["token_ids"] is None
    assert "token_ids" not in repr(server.chat(stream=True).events() + server.complete(stream=True).events())


def test_return_tokens_as_token_ids(client: openai.OpenAI) -> None:
    reply = chat(client, logprobs=True, top_logprobs=1, extra_body={"return_tokens_as_token_ids": True})
    assert reply.choices[0].logprobs is not None
    [first, *_] = reply.choices[0].logprobs.content or []
    assert (first.token, first.bytes, first.top_logprobs[0].token) == ("token_id:72", [72], "token_id:32")


@pytest.mark.parametrize(
    ("kept", "side", "fields", "expected"),
    [
        (2, None, {}, "lo"),
        (2, "left", {}, "lo"),
        (2, "right", {}, "<|bos|>h"),
        (99, None, {}, "<|bos|>hello"),
        (-1, None, {}, "<|bos|>hello"),
        (-1, None, {"max_tokens": 253}, "llo"),
        (-1, "right", {"max_tokens": 253}, "<|bos|>he"),
    ],
)
def test_truncate_prompt_tokens(
    server: RunningServer, client: openai.OpenAI, kept: int, side: str | None, fields: dict[str, Any], expected: str
) -> None:
    extra = {"truncate_prompt_tokens": kept, "truncation_side": side}
    client.completions.create(model="test", prompt="hello", extra_body=extra, **fields)
    assert prompt_text(server) == expected


def test_truncated_chats_keep_their_end(server: RunningServer, client: openai.OpenAI) -> None:
    for fields in ({"max_completion_tokens": 240}, {"max_tokens": 240}):
        chat(client, extra_body={"truncate_prompt_tokens": -1}, **fields)
        assert prompt_text(server) == "\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert len(server.engine.requests[-1].prompt_token_ids) == 16
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, extra_body={"truncate_prompt_tokens": 300}, max_tokens=256)


def test_special_tokens_documents_and_variables(server: RunningServer, client: openai.OpenAI) -> None:
    from eventlm.text.chat_template import ChatTemplate

    source = "{{ style }}{% for each in documents or [] %}[{{ each.text }}]{% endfor %}{{ add_generation_prompt }}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    for extra, expected in (
        ({}, "True"),
        ({"add_generation_prompt": False}, "False"),
        ({"add_special_tokens": True}, "<|bos|>True"),
        ({"documents": [{"text": "d"}]}, "[d]True"),
        ({"chat_template_kwargs": {"style": "loud "}}, "loud True"),
    ):
        client.chat.completions.create(model="test", messages=MESSAGES, extra_body=extra)
        assert prompt_text(server) == expected


def test_reasoning_effort_is_for_templates_that_read_it(server: RunningServer, client: openai.OpenAI) -> None:
    from eventlm.text.chat_template import ChatTemplate

    chat(client, reasoning_effort="none")
    with pytest.raises(openai.BadRequestError, match="its chat template does not read it") as caught:
        chat(client, reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    server.context.tokenizer.chat_template = ChatTemplate("Effort: {{ reasoning_effort or 'medium' }}", {})
    for fields, expected in (({}, "medium"), ({"reasoning_effort": "low"}, "low")):
        chat(client, **fields)
        assert prompt_text(server) == f"Effort: {expected}"
    # As in vLLM: any effort but none turns a switch on, unless the request turns it itself.
    server.context.tokenizer.chat_template = ChatTemplate("{{ 'think' if enable_thinking else 'answer' }}", {})
    for fields, expected in (
        ({}, "answer"),
        ({"reasoning_effort": "low"}, "think"),
        ({"reasoning_effort": "none"}, "answer"),
        ({"reasoning_effort": "low", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "answer"),
    ):
        chat(client, **fields)
        assert prompt_text(server) == expected


def test_continue_final_message(server: RunningServer, client: openai.OpenAI) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    client.chat.completions.create(
        model="test", messages=messages, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    )
    assert prompt_text(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "


def test_cache_salt(server: RunningServer, client: openai.OpenAI) -> None:
    chat(client, extra_body={"cache_salt": "s"})
    client.completions.create(model="test", prompt="hi", extra_body={"cache_salt": "t"})
    assert [request.cache_salt for request in server.engine.requests] == ["s", "t"]


def test_refusals_name_the_parameter(client: openai.OpenAI) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (client.chat.completions, {"chat_template": "{{ messages }}"}, "is not accepted: a template is a program"),
        (client.chat.completions, {"kv_transfer_params": {"do_remote_decode": True}}, "in its own workers"),
        (client.completions, {"kv_transfer_params": {}}, "in its own workers"),
        (client.completions, {"thinking_token_budget": 5}, "leave it out or set it to -1"),
        (client.chat.completions, {"length_penalty": 0.5}, "is for beam search"),
        (client.completions, {"suffix": "end"}, 'leave it out or set it to ""'),
        (client.completions, {"best_of": 3, "n": 2}, "the same value as 'n'"),
        (client.completions, {"logit_bias": {"5": 1}, "use_beam_search": True}, "not supported with beam search"),
        (client.completions, {"max_tokens": 0}, "only allowed when 'echo' is true"),
    ]
    for endpoint, fields, message in refused:
        prompt: Any = {"messages": MESSAGES} if endpoint is client.chat.completions else {"prompt": "x"}
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            endpoint.create(model="test", **prompt, extra_body=fields)
        assert caught.value.param == next(iter(fields))
        assert caught.value.type == "invalid_request_error"


def test_media_are_refused(client: openai.OpenAI) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ):
        content = [{"type": "text", "text": "What is this?"}, part]
        with pytest.raises(openai.BadRequestError, match="takes text parts only") as caught:
            client.chat.completions.create(model="test", messages=[{"role": "user", "content": content}])  # type: ignore[list-item,misc]
        assert caught.value.param == "messages[0].content[1].type"


async def test_async_client(server: RunningServer) -> None:
    """Several prompts echoed and scored, token ids, a continued message: at a time, by the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        scored, plain, stream = await asyncio.gather(
            client.completions.create(
                model="test", prompt=[[5, 6], [7]], echo=True, logprobs=0, max_tokens=0, user="u",
                extra_body={"return_token_ids": True},
            ),
            client.chat.completions.create(
                model="test", messages=MESSAGES, max_completion_tokens=2, metadata={"a": "b"},
            ),
            client.chat.completions.create(
                model="test", messages=MESSAGES, stream=True, stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            ),
        )  # fmt: skip
        Completion.model_validate(plain_dump(scored))
        assert [(choice.model_extra or {})["prompt_token_ids"] for choice in scored.choices] == [[5, 6], [7]]
        assert [(choice.model_extra or {})["token_ids"] for choice in scored.choices] == [[], []]
        assert plain.choices[0].message.content == "He"
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        ids = [(chunk.choices[0].model_extra or {}).get("token_ids", []) for chunk in chunks[:-1]]
        assert b"".join(map(bytes, ids)) == b"Hello, world"


def plain_dump(reply: Completion) -> dict[str, Any]:
    """Without the nulls that OpenAI sends in these lists although its types have none."""
    dumped = reply.model_dump()
    for choice in dumped["choices"]:
        choice["logprobs"]["token_logprobs"] = [value or 0.0 for value in choice["logprobs"]["token_logprobs"]]
        choice["logprobs"]["top_logprobs"] = [value or {} for value in choice["logprobs"]["top_logprobs"]]
    return dumped
