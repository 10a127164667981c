"""`/v1/messages` and `/v1/messages/count_tokens` through the official client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import Message
from pydantic import BaseModel

from eventlm.text.chat_template import ChatTemplate
from tests.server.anthropic.conftest import Start
from tests.server.anthropic.conversations import (
    ADD_CALL,
    CALL,
    MESSAGES,
    PATH,
    TOOLS,
    events_of,
    prompt_of,
    rows,
    send,
)
from tests.server.engine_double import spell
from tests.server.sent_streams import parse, resume


def test_create(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    reply = client.messages.create(
        model="test",
        max_tokens=100,
        system="Be brief.",
        messages=MESSAGES,
        stop_sequences=["world"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    assert [block.to_dict() for block in reply.content] == [{"type": "text", "text": "Hello, "}]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "world")
    assert reply._request_id is not None
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 100)


def test_stream_helper(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic(reasoning_parser="qwen3")
    server.engine.script = spell(f"<think>Hm.</think>Let me see.\n{CALL}", width=2)
    with client.messages.stream(model="test", max_tokens=1000, messages=MESSAGES, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} < set(events)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"city": "Zürich 🙂", "days": 2}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"
    with client.messages.stream(model="test", max_tokens=1000, messages=MESSAGES, tools=TOOLS) as stream:
        assert "".join(stream.text_stream) == "Let me see."


async def test_async_client(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic()
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        reply = await client.messages.create(model="test", max_tokens=100, messages=MESSAGES)
        async with client.messages.stream(model="test", max_tokens=100, messages=MESSAGES) as stream:
            assert await stream.get_final_text() == "Hello, world"
    assert reply.content[0].text == "Hello, world"  # type: ignore[union-attr]


class Weather(BaseModel):
    city: str
    days: int


def test_parse(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    server.engine.script = spell('{"city": "Bern", "days": 2}')
    reply = client.messages.parse(model="test", max_tokens=100, messages=MESSAGES, output_format=Weather)
    assert reply.parsed_output == Weather(city="Bern", days=2)
    assert '"city"' in server.engine.requests[-1].sampling.grammar


def test_tool_runner(start_with_anthropic: Start) -> None:
    """The client calls the tools that the model asks for and sends their results, until there is a text."""
    server, client = start_with_anthropic()
    replies = [f"Let me see.\n{ADD_CALL}\n{ADD_CALL}", ADD_CALL.replace("1", "7"), "It is 9."]
    server.engine.script = lambda request, index: [[byte] for byte in replies[len(server.engine.requests) - 1].encode()]
    asked: list[int] = []

    @beta_tool
    def add(a: int) -> str:
        """Add 2 to a number.

        Args:
            a: the number
        """
        asked.append(a)
        if a == 7:
            raise ValueError("seven is too much")
        return str(a + 2)

    runner = client.beta.messages.tool_runner(model="test", max_tokens=1000, messages=MESSAGES, tools=[add])
    final = runner.until_done()
    assert asked == [1, 1, 7]
    assert (final.content[0].text, final.stop_reason) == ("It is 9.", "end_turn")  # type: ignore[union-attr]
    prompt = prompt_of(server)
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\nLet me see.\n{written}\n{written}<|im_end|>\n<|im_start|>user\n" in prompt
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>" in prompt
    assert "<tool_response>\nError: " in prompt
    assert "seven is too much" in prompt
    # Whatever was said before is said again, so that the prefix is found in the cache.
    first, second, third = (server.context.tokenizer.decode(each.prompt_token_ids) for each in server.engine.requests)
    assert second.startswith(first)
    assert third.startswith(second)


def test_prefill(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "The answer is ("}]
    client.messages.create(model="test", max_tokens=100, messages=begun)
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe answer is (")


def test_thinking_is_up_to_the_template(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic(reasoning_parser="qwen3")
    source = "{{ messages[-1].content }}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    server.engine.script = spell("Hm.\n</think>\n\nYes.")
    thinking: Any = {"type": "enabled", "budget_tokens": 2048}
    reply = client.messages.create(model="test", max_tokens=3000, messages=MESSAGES, thinking=thinking)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.content[0].thinking == "Hm."  # type: ignore[union-attr]
    assert "thought{0,2048}" in server.engine.requests[-1].sampling.grammar
    client.messages.create(model="test", max_tokens=3000, messages=MESSAGES, thinking={"type": "disabled"})
    assert prompt_of(server) == "hi<think>\n\n</think>\n\n"
    # Both blocks can be sent back, with the question that follows.
    history: Any = [*MESSAGES, {"role": "assistant", "content": reply.content}, *MESSAGES]
    source = "{% for message in messages %}{{ message.reasoning_content }}|{{ message.content }};{% endfor %}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    client.messages.create(model="test", max_tokens=100, messages=history)
    assert prompt_of(server) == "|hi;Hm.|Yes.;|hi;"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": TOOLS},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
    ],
)
def test_count_tokens(start_with_anthropic: Start, fields: dict[str, Any]) -> None:
    server, client = start_with_anthropic()
    body: Any = {"model": "test", "messages": MESSAGES, **fields}
    counted = client.messages.count_tokens(**body)
    assert server.engine.requests == []
    usage = client.messages.create(max_tokens=9, **body).usage
    assert usage.cache_read_input_tokens is not None
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == len(server.engine.requests[0].prompt_token_ids)


def test_what_counts_no_tokens(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=MESSAGES)
    tool: Any = {"name": "a", "input_schema": {"type": "array"}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema.type"):
        client.messages.count_tokens(model="test", messages=MESSAGES, tools=[tool])
    server.engine.state = "loading"
    with pytest.raises(anthropic.InternalServerError):
        client.messages.count_tokens(model="test", messages=MESSAGES)


def test_scheduling_is_as_for_chats(start_server: Any) -> None:
    from eventlm.config import ServiceClass

    server = start_server({"gold": ServiceClass(priority=-3, deadline_ms=500)})
    headers = {"x-eventlm-class": "gold", "x-request-id": "mine"}
    body = {"model": "test", "max_tokens": 9, "messages": MESSAGES, "slo": {"tpot_ms": 50}}
    reply = server.post(PATH, body, headers)
    scheduling = server.engine.requests[0].scheduling
    assert (scheduling.service_class, scheduling.priority, scheduling.deadline_ns) == ("gold", -3, 500_000_000)
    assert scheduling.slo_tpot_ns == 50_000_000
    assert reply.json()["usage"]["service_tier"] == "gold"
    assert reply.headers["x-request-id"] == reply.headers["request-id"] == "mine"
    # It can be asked for by its id, and by that of its reply.
    for name in ("mine", reply.json()["id"]):
        assert server.request("GET", f"/v1/requests/{name}").status == 200
        assert server.request("GET", f"/v1/requests/{name}/explain").status == 200


def test_a_stream_resumes_after_any_event(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic(resume_seconds=30, reasoning_parser="qwen3")
    server.engine.script = spell(f"<think>Hm, é?</think>Let me see.\n{CALL}\n{ADD_CALL}", width=3)
    reply = send(server, stream=True, tools=TOOLS)
    events = parse(reply.data)
    reply_id = json.loads(events[0].data)["message"]["id"]
    assert reply_id.startswith("msg_")
    assert len({event.id for event in events}) == len(events)
    for index, event in enumerate(events[:-1]):
        rest = parse(resume(server, reply_id, event.id).data)
        assert joined(rest) == joined(events[index + 1 :]), event.id
    assert resume(server, reply_id, events[-1].id).status == 204
    whole = resume(server, reply_id)
    assert rows(events_of(whole)) == rows(events_of(reply))


def joined(events: Any) -> list[Any]:
    return rows([json.loads(event.data) for event in events])


def test_the_context_bounds_max_tokens(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    reply = client.messages.create(model="test", max_tokens=32_000, messages=MESSAGES)
    assert isinstance(reply, Message)
    request = server.engine.requests[0]
    assert request.sampling.max_tokens == 4096 - len(request.prompt_token_ids)
    long: Any = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5019 tokens > 4095 maximum"):
        client.messages.create(model="test", max_tokens=1, messages=long)
