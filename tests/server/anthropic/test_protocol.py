"""Bodies of requests, and what their errors say."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.server.anthropic.protocol import MAX_MESSAGES, MessagesRequest
from eventlm.text.decoding import convert_request
from tests.server.anthropic.conftest import Start
from tests.server.anthropic.conversations import ADD, MESSAGES, PATH, prompt_of, send
from tests.server.conftest import RunningServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def test_the_longest_name_of_a_tool(server: RunningServer) -> None:
    server.engine.max_model_len = 4096
    for length, status in ((128, 200), (129, 400)):
        assert send(server, tools=[{**ADD, "name": "a" * length}]).status == status


def test_most_messages() -> None:
    raw: dict[str, Any] = {"model": "test", "max_tokens": 1, "messages": MESSAGES * MAX_MESSAGES}
    assert len(convert_request(raw, MessagesRequest, {}).messages) == 100_000
    raw["messages"] += MESSAGES
    with pytest.raises(InputError, match=r"'messages'.*100000"):
        convert_request(raw, MessagesRequest, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "Invalid type for 'max_tokens': expected `int`, got `null`."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0 (greater_than_equal)."),
        ({"messages": []}, "Invalid value for 'messages': at least one message is needed."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "supported values are 'assistant', 'system', 'user'."),
        ({"messages": [{"role": "user"}]}, "Missing required parameter: 'messages[0].content'."),
        (user({"type": "text"}), "Missing required parameter: 'messages[0].content[0].text'."),
        (user({"text": "x"}), "Missing required parameter: 'messages[0].content[0].type'."),
        *(
            (
                user({"type": type_}),
                f"'messages[0].content[0].type': supported values are 'text', {others}, got '{type_}'.",
            )
            for type_ in ("image", "document", "search_result", "container_upload", "web_search_tool_result")
            for others in ["'thinking', 'redacted_thinking', 'tool_use', 'tool_result'"]
        ),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}),
            "'messages[0].content[0].content[0].type': supported values are 'text', got 'image'.",
        ),
        (
            user({"type": "tool_use", "id": "a", "name": "add", "input": {}}),
            "'messages[0].content[0].type': only messages of the role 'assistant' have 'tool_use' blocks.",
        ),
        (
            user({"type": "redacted_thinking", "data": "x"}),
            "only messages of the role 'assistant' have 'redacted_thinking' blocks.",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "only messages of the role 'user' have 'tool_result' blocks.",
        ),
        (
            {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {}}]},
                ]
            },
            "Invalid value for 'messages[1].content': the last message calls tools; append their results.",
        ),
        ({"system": [{"type": "image"}]}, "'system[0].type': supported values are 'text', got 'image'."),
        ({"stop_sequences": [""]}, "Invalid value for 'stop_sequences[0]': it must not be empty."),
        ({"stop_sequences": "x"}, "Invalid type for 'stop_sequences'"),
        ({"temperature": -1}, "Invalid value for 'temperature'"),
        ({"top_p": 0}, "Invalid value for 'top_p'"),
        ({"top_k": -1}, "Invalid value for 'top_k'"),
        ({"tools": [{"input_schema": {}}]}, "Missing required parameter: 'tools[0].name'."),
        ({"tools": [{"name": "add"}]}, "Missing required parameter: 'tools[0].input_schema'."),
        ({"tools": [{**ADD, "name": "a b"}]}, "'tools[0].name': it must have 1 to 128 letters"),
        ({"tools": [ADD, ADD]}, "Invalid value for 'tools[1].name': another tool has this name."),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "'tools[0].input_schema.type': the parameters"),
        (
            {"tools": [{"name": "a", "input_schema": {"properties": {"b": 1}}}]},
            "'tools[0].input_schema.properties.b': a schema is an object or a boolean.",
        ),
        *(
            (
                {"tools": [ADD, {"type": type_, "name": "bash"}]},
                f"'tools[1].type': '{type_}' is not supported, because only Anthropic's models know how it is defined; "
                "give it a 'name', a 'description' and an 'input_schema', without 'type'.",
            )
            for type_ in ("bash_20250124", "text_editor_20250728", "computer_20251124", "memory_20250818")
        ),
        *(
            (
                {"tools": [{"type": type_, "name": "x"}]},
                f"'tools[0].type': '{type_}' is not supported, because it runs on Anthropic's servers; run it at the "
                "client and give it a 'name', a 'description' and an 'input_schema', without 'type'.",
            )
            for type_ in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "mcp_toolset")
        ),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "Missing required parameter: 'tool_choice.name'."),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool", "name": "no"}},
            "Invalid value for 'tool_choice.name': 'tools' has no function of this name.",
        ),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' is only allowed when 'tools' are given."),
        ({"tool_choice": {"type": "required"}}, "supported values are 'any', 'auto', 'none', 'tool'."),
        ({"thinking": {"type": "on"}}, "supported values are 'adaptive', 'between_tools', 'disabled', 'enabled'."),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "Invalid value for 'thinking.budget_tokens'"),
        ({"output_config": {"effort": "most"}}, "supported values are 'high', 'low', 'max', 'medium', 'xhigh'."),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "what"}}}},
            "Invalid value for 'output_config.format.schema'",
        ),
        ({"container": "c"}, "'container' is not supported yet; leave it out."),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers' is not supported: connect to MCP servers at the client"),
        ({"service_tier": "gold"}, "Invalid value for 'service_tier'"),
        ({"drop_if_late": True}, "'drop_if_late' needs a 'deadline_ms' or 'slo.ttft_ms' to be late for."),
    ],
)
def test_mistakes(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    reply = send(server, **fields)
    assert reply.status == 400, reply.data
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert server.engine.requests == []


def test_what_changes_nothing(start_with_anthropic: Start) -> None:
    """Whatever clients of several versions send."""
    server, client = start_with_anthropic()
    plain = client.messages.create(model="test", max_tokens=100, messages=MESSAGES)
    prompt = prompt_of(server)
    cached: Any = {"type": "ephemeral", "ttl": "1h"}
    reply = client.beta.messages.create(
        model="test",
        max_tokens=100,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cached}]}],
        metadata={"user_id": "somebody"},
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        extra_body={
            "cache_control": cached,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "inference_geo": "eu",
            "speed": "fast",
            "diagnostics": {"previous_message_id": None},
            "mcp_servers": [],
            "new_field": 1,
        },
    )
    assert prompt_of(server) == prompt
    assert [block.to_dict() for block in reply.content] == [block.to_dict() for block in plain.content]
    assert server.post(PATH, {"model": "test", "max_tokens": 9.0, "messages": MESSAGES}).status == 200


def test_service_tiers(start_with_anthropic: Start) -> None:
    _, client = start_with_anthropic()
    for tier in ("auto", "standard_only"):
        body: Any = {"model": "test", "max_tokens": 9, "messages": MESSAGES, "service_tier": tier}
        reply = client.messages.create(**body)
        assert reply.usage.service_tier == "standard"


def test_the_reply_follows_a_schema(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    format: Any = {"type": "json_schema", "schema": SCHEMA}
    for extra in ({"output_config": {"format": format}}, {"output_format": format}):
        client.messages.create(model="test", max_tokens=9, messages=MESSAGES, extra_body=extra)
        assert '"additionalProperties": false' in server.engine.requests[-1].sampling.grammar.replace('":f', '": f')
