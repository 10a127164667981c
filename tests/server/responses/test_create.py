"""Responses through the official client, and what they share with all other requests."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from eventlm.config import ServiceClass
from tests.processes import wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell
from tests.server.responses.responding import LOGPROBS, PATH, TOOLS, parse_named, respond, streamed
from tests.server.sent_streams import parse
from tests.server.tool_calls import ARGUMENTS, CALL


class Place(BaseModel):
    """What the model is to give as JSON."""

    city: str
    days: int


def test_a_text(start_with_client: Any) -> None:
    _, client = start_with_client()
    response = client.responses.create(model="test", input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == "Hello, world"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.object, response.model, response.metadata) == ("response", "test", {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + len("Hello, world")
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.completed_at >= response.created_at


def test_what_is_asked_for_is_shown(start_with_client: Any) -> None:
    _, client = start_with_client()
    fields: dict[str, Any] = {
        "instructions": "Be brief.", "max_output_tokens": 50, "max_tool_calls": 2, "metadata": {"a": "b"},
        "parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s", "store": False,
        "temperature": 0.5, "top_p": 0.9, "tools": TOOLS, "tool_choice": "auto", "top_logprobs": 3, "user": "u",
        "truncation": "auto", "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "reasoning": {"effort": "none", "summary": "auto"},
    }  # fmt: skip
    response = client.responses.create(model="test", input="hi", **fields)
    assert {name: getattr(response, name) for name in fields if name not in ("tools", "text", "reasoning")} == {
        name: value for name, value in fields.items() if name not in ("tools", "text", "reasoning")
    }
    shown = response.to_dict()
    assert {name: shown[name] for name in ("tools", "text", "reasoning")} == {
        name: fields[name] for name in ("tools", "text", "reasoning")
    }
    default = client.responses.create(model="test", input="hi")
    assert (default.temperature, default.top_p, default.tool_choice, default.tools) == (1.0, 1.0, "auto", [])
    assert (default.truncation, default.parallel_tool_calls, default.text.format.type) == ("disabled", True, "text")


def test_the_client_s_stream_helper(start_with_client: Any) -> None:
    server, client = start_with_client(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.script = spell(f"<think>Hm.</think>So.\n{CALL}\n{CALL}", width=5)
    tools = [{**tool, "strict": True, "parameters": {"type": "object", "properties": {}}} for tool in TOOLS]
    with client.responses.stream(model="test", input="hi", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    reasoning, message, *calls = final.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == final.output_text == "So."
    assert [call.parsed_arguments for call in calls] == [ARGUMENTS] * 2
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads(deltas[-1].snapshot) == ARGUMENTS


def test_parsed_text(start_with_client: Any) -> None:
    server, client = start_with_client()
    server.engine.script = spell('{"city": "Zürich", "days": 2}')
    response = client.responses.parse(model="test", input="hi", text_format=Place)
    assert response.output_parsed == Place(city="Zürich", days=2)
    grammar = json.loads(server.engine.requests[0].sampling.grammar)
    assert set(grammar["grammars"][0]["json_schema"]["properties"]) == {"city", "days"}
    with client.responses.stream(model="test", input="hi", text_format=Place) as stream:
        [done] = [event for event in stream if event.type == "response.output_text.done"]
    assert done.parsed == Place(city="Zürich", days=2)


def test_a_limit_in_the_client_s_stream(start_with_client: Any) -> None:
    _, client = start_with_client()
    stream = client.responses.create(model="test", input="hi", max_output_tokens=5, stream=True)
    *_, last = list(stream)
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert last.response.output_text == "Hello"


def test_an_error_in_the_client_s_stream(start_with_client: Any) -> None:
    server, client = start_with_client()
    server.engine.script_end = "error"
    *_, error, failed = list(client.responses.create(model="test", input="hi", stream=True))
    assert (error.type, failed.type) == ("error", "response.failed")
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")


def test_a_turn_and_the_one_after_it(start_with_client: Any) -> None:
    """What a response gives can be sent back as it is."""
    server, client = start_with_client(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.script = spell(f"<think>Hm.</think>So.\n{CALL}")
    first = client.responses.create(model="test", input="Weather?", tools=TOOLS)
    server.engine.script = spell("Sunny.")
    items = [
        {"role": "user", "content": "Weather?"},
        *first.output,
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": '{"sun": true}'},
    ]
    second = client.responses.create(model="test", input=items, tools=TOOLS)
    assert second.output_text == "Sunny."
    prompt = server.context.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "assistant\nSo.\n<tool_call>" in prompt
    assert '<tool_response>\n{"sun": true}\n</tool_response>' in prompt
    count = client.responses.input_tokens.count(model="test", input=items, tools=TOOLS)
    assert count.input_tokens == second.usage.input_tokens


#: Forms of `tool_choice`: whether what the model says is bound to the schemas, and what it becomes.
CHOICES: list[tuple[Any, bool, str]] = [
    ("none", False, "message"),
    ("auto", True, "function_call"),
    ("required", True, "function_call"),
    ({"type": "function", "name": "get_weather"}, True, "function_call"),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, True, "message"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, True, "message"),
]


def test_tool_choice(start_with_client: Any) -> None:
    server, client = start_with_client(tool_parser="hermes")
    server.engine.script = spell(CALL)
    for choice, is_bound, type_ in CHOICES:
        response = client.responses.create(model="test", input="hi", tools=TOOLS, tool_choice=choice)
        assert response.to_dict()["tool_choice"] == choice
        assert bool(server.engine.requests[-1].sampling.grammar) == is_bound, choice
        assert [item.type for item in response.output] == [type_], choice


def test_one_call_at_most(start_with_client: Any) -> None:
    server, client = start_with_client(tool_parser="hermes")
    server.engine.script = spell(f"{CALL}\n{CALL}")
    for parallel, number in ((True, 2), (False, 1)):
        response = client.responses.create(model="test", input="hi", tools=TOOLS, parallel_tool_calls=parallel)
        assert [item.status for item in response.output] == ["completed"] * number


def test_errors_are_the_client_s(start_with_client: Any) -> None:
    _, client = start_with_client()
    with pytest.raises(openai.BadRequestError, match="run it at the client") as caught:
        client.responses.create(model="test", input="hi", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="none", input="hi")


def test_classes_deadlines_and_ids_are_those_of_a_chat(start_server: Any) -> None:
    server: RunningServer = start_server({"batch": ServiceClass(priority=7)})
    reply = respond(server, service_tier="batch", deadline_ms=5000, request_id="mine-1")
    scheduling = server.engine.requests[0].scheduling
    assert (scheduling.service_class, scheduling.priority, scheduling.deadline_ns) == ("batch", 7, 5_000_000_000)
    assert reply.json()["service_tier"] == "batch"
    assert reply.headers["x-request-id"] == "mine-1"
    assert "service_tier" not in respond(server).json()
    assert_error(respond(server, priority="x"), 400, INVALID, "priority", "invalid_type")


@pytest.mark.parametrize("fields", [{}, {"include": [LOGPROBS]}, {"tools": TOOLS}, {"max_output_tokens": 20}])
def test_a_stream_resumes_after_any_event(start_server: Any, fields: dict[str, Any]) -> None:
    server: RunningServer = start_server(resume_seconds=30, tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 4096
    server.engine.script = spell(f"<think>Hm.</think>So.\n{CALL}", width=3)
    stream = respond(server, stream=True, **fields).data
    events = parse(stream)
    reply_id = json.loads(events[0].data)["response"]["id"]
    assert len({event.id for event in events}) == len(events)
    for index in range(0, len(events), 5):
        rest = server.request("GET", f"/v1/stream/{reply_id}", headers={"Last-Event-ID": events[index].id})
        assert [event.data for event in parse(rest.data)] == [event.data for event in events[index + 1 :]]
    again = server.request("GET", f"/v1/stream/{reply_id}").data
    assert parse_named(again) == parse_named(stream)
    assert [event["sequence_number"] for event in parse_named(again)] == list(range(len(events)))


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    server.engine.script_end = None
    server.engine.step_seconds = 0.001
    body = json.dumps({"model": "test", "input": "hi", "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.raw(head.encode() + body) as connection:
        data = b""
        while b"response.output_text.delta" not in data:
            data += connection.recv(65536)
    wait_until(lambda: server.engine.cancelled == [(0, "client")])
    server.engine.script_end = "eos"
    assert streamed(server)[-1]["type"] == "response.completed"
