"""Prompts: instructions, shortening, counting, and functions that are strict if they can be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell
from tests.server.responses.responding import PATH, TOOLS, prompt_of, respond

CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "one " * 10},
    {"role": "assistant", "content": "two " * 10},
    {"role": "user", "content": "three " * 10},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "four " * 10},
]


@pytest.fixture
def server(start_server: Any) -> RunningServer:
    server: RunningServer = start_server(tool_parser="hermes")
    server.engine.max_model_len = 4096
    return server


@pytest.mark.parametrize(
    ("instructions", "input", "expected"),
    [
        (None, "hi", [("user", "hi")]),
        ("Be brief.", "hi", [("system", "Be brief."), ("user", "hi")]),
        # Many templates take one such message, at the start.
        (
            "Be brief.",
            [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}],
            [("system", "Be brief.\n\nBe kind."), ("user", "hi")],
        ),
        (
            "Be brief.",
            [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be kind."}],
            [("system", "Be brief."), ("user", "hi"), ("system", "Be kind.")],
        ),
    ],
)
def test_instructions_come_first(
    server: RunningServer, instructions: str | None, input: Any, expected: list[tuple[str, str]]
) -> None:
    response = respond(server, input=input, instructions=instructions).json()
    assert response["instructions"] == instructions
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in expected)
    assert prompt_of(server) == f"{text}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"input": None}, "input", "missing_required_parameter", "input"),
        ({"input": []}, "input", "invalid_value", "it is empty"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "instructions": "Be brief."},
         "input", "invalid_value", "send a message too"),
        ({"input": [{"id": "msg_1"}]}, "input[0].id", "invalid_value", "no item has the id 'msg_1'"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter", "input[0].id"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "invalid_value", "'user'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter", "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value", "'tools' are given"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "invalid_value",
         "no function of this name"),
        (
            {"tools": [{**TOOLS[0], "strict": True, "parameters": {"properties": {"a": {"type": "x"}}}}]},
            "tools[0].parameters.properties.a.type", "invalid_value", "the types are",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema",
         "missing_required_parameter", "text.format.schema"),
        # The template does not read it.
        ({"reasoning": {"effort": "low"}}, None, None, ""),
        ({"stream_options": {}}, None, None, ""),
    ],
)  # fmt: skip
def test_errors_name_the_field_of_the_body(
    server: RunningServer, fields: dict[str, Any], param: str | None, code: str | None, message: str
) -> None:
    reply = respond(server, **fields)
    if param is None:
        assert reply.status == 200, reply.data
    else:
        assert_error(reply, 400, INVALID, param, code, message)


def test_an_input_that_is_too_long_is_an_error(server: RunningServer) -> None:
    server.engine.max_model_len = 100
    for fields in ({}, {"truncation": "disabled"}, {"truncation": "auto"}):
        reply = respond(server, input="x" * 100, max_output_tokens=10, **fields)
        assert_error(reply, 400, INVALID, "input", "context_length_exceeded", "maximum context length is 100 tokens")
        assert "in the input" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("max_model_len", "first"),
    [(600, "one "), (400, "three "), (300, "<tool_call>")],
)
def test_truncation_drops_what_came_first(server: RunningServer, max_model_len: int, first: str) -> None:
    """Instructions stay, a cut is before a user's message if it can, and no output loses its call."""
    server.engine.max_model_len = max_model_len
    reply = respond(server, input=CONVERSATION, instructions="Be brief.", truncation="auto", max_output_tokens=40)
    assert (reply.status, reply.json()["truncation"]) == (200, "auto"), reply.data
    prompt = prompt_of(server)
    start = "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n"
    assert prompt.startswith(start)
    assert prompt.removeprefix(start).split("\n", 1)[1].startswith(first)
    assert prompt.count("four") == 10
    assert len(server.engine.requests[-1].prompt_token_ids) <= max_model_len - 40


def test_truncation_changes_nothing_that_fits(server: RunningServer) -> None:
    prompts = []
    for truncation in ("disabled", "auto"):
        assert respond(server, input=CONVERSATION, truncation=truncation).status == 200
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": CONVERSATION, "instructions": "Be brief."},
        {"tools": TOOLS},
        {"input": CONVERSATION, "truncation": "auto", "max_output_tokens": 3500},
    ],
)
def test_a_count_is_that_of_the_response(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"input": "hi", **fields}
    counted = server.post(f"{PATH}/input_tokens", body).json()
    assert counted == {
        "object": "response.input_tokens", "input_tokens": respond(server, **body).json()["usage"]["input_tokens"],
    }  # fmt: skip


def test_a_count_may_exceed_the_context(server: RunningServer) -> None:
    server.engine.max_model_len = 100
    assert server.post(f"{PATH}/input_tokens", {"input": "x" * 200}).json()["input_tokens"] > 200


def test_a_count_for_a_model_that_is_not_there(server: RunningServer) -> None:
    reply = server.post(f"{PATH}/input_tokens", {"model": "x", "input": "hi"})
    assert_error(reply, 404, INVALID, "model", "model_not_found", "'x' does not exist")
    assert_error(respond(server, model="x"), 404, INVALID, "model", "model_not_found", "'x' does not exist")


def test_functions_are_strict_where_their_schemas_can_be_followed(server: RunningServer) -> None:
    server.engine.script = spell("No.")
    odd = {"type": "function", "name": "odd", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    for tools, is_strict in (
        (TOOLS, True),
        ([{**tool, "strict": False} for tool in TOOLS], False),
        ([odd], False),
    ):
        assert respond(server, tools=tools).status == 200
        assert bool(server.engine.requests[-1].sampling.grammar) == is_strict
    reply = respond(server, tools=[{**odd, "strict": True}])
    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("tools[0].parameters")
