"""Messages of every role: what a template is given, and what is refused, naming the place."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from eventlm.text.chat.messages import chat_messages, render_chat
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.protocol import ChatCompletionRequest
from tests.server.conftest import INVALID, RunningServer, assert_error

QUESTION = {"role": "user", "content": "x"}


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


def rendered(*messages: Any, **options: Any) -> list[dict[str, Any]]:
    request = msgspec.convert({"model": "test", "messages": list(messages)}, ChatCompletionRequest)
    return chat_messages(request, **options)


def test_plain_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(
        {"role": "system", "content": "s", "name": "boss"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": None, "audio": None},
        {"role": "assistant", "content": "so", "reasoning": "because", "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "cut"},
    ) == [
        {"role": "system", "content": "s", "name": "boss"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "so", "reasoning_content": "because", "thinking": "because"},
        {"role": "assistant", "content": "never"},
        {"role": "assistant", "content": "", "reasoning_content": "cut", "thinking": "cut"},
    ]


def test_a_developer_is_the_system_unless_the_template_knows_him() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert rendered(message) == [{"role": "system", "content": "Be brief."}]
    assert rendered(message, knows_developer=True) == [message]
    assert ChatTemplate("{% if messages[0].role == 'developer' %}{% endif %}", {}).knows_developer
    assert not ChatTemplate("{{ messages }}", {}).knows_developer


def test_tool_calls_and_their_results() -> None:
    calls = [call('{"a": [1, null]}'), call(""), call("[1]"), call('{"a": tru')]
    answer, result = rendered(
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    )
    assert answer["content"] == ""
    found = [made["function"].pop("arguments") for made in answer["tool_calls"]]
    # What is not an object is left as the model wrote it.
    assert found == [{"a": [1, None]}, {}, "[1]", '{"a": tru']
    assert answer["tool_calls"][0] == {"id": "c1", "type": "function", "function": {"name": "add"}}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"role": "tool", "content": "x"}, "messages[1].tool_call_id", "missing_required_parameter"),
    ({"role": "tool", "content": None, "tool_call_id": "c1"}, "messages[1].content", "invalid_type"),
    ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id", "invalid_type"),
    ({"role": "user", "content": "x", "tool_call_id": "c1"}, "messages[1].tool_call_id", "invalid_value"),
    ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "messages[1].tool_calls", "invalid_value"),
    ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content", "invalid_type"),
    (
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        "messages[1].tool_calls[0].function",
        "missing_required_parameter",
    ),
    (
        {"role": "assistant", "tool_calls": [call("{}", type="custom")]},
        "messages[1].tool_calls[0].type",
        "invalid_value",
    ),
    (
        {"role": "assistant", "tool_calls": [call("{}", function={"name": "f", "arguments": {}})]},
        "messages[1].tool_calls[0].function.arguments",
        "invalid_type",
    ),
    (
        {"role": "assistant", "function_call": {"name": "f"}, "content": ""},
        "messages[1].function_call",
        "invalid_value",
    ),
    ({"role": "a role", "content": "x"}, "messages[1].role", "invalid_value"),
    ({"role": "Assistant", "content": "x"}, "messages[1].role", "invalid_value"),
    ({"role": "x" * 65, "content": "x"}, "messages[1].role", "invalid_value"),
    ({"role": "user", "content": "x", "refusal": "no"}, "messages[1].refusal", "invalid_value"),
    ({"role": "assistant", "content": None}, "messages[1].content", "invalid_type"),
    ({"role": "user", "content": [{"type": "refusal"}]}, "messages[1].content[0].refusal", "invalid_type"),
    *(
        ({"role": "user", "content": [{"type": kind, kind: {}}]}, "messages[1].content[0].type", "invalid_value")
        for kind in ("image_url", "input_audio", "video_url", "file")
    ),
]


@pytest.mark.parametrize(("message", "param", "code"), BAD)
def test_refused_messages(server: RunningServer, message: dict[str, Any], param: str, code: str) -> None:
    assert_error(server.chat(messages=[QUESTION, message]), 400, INVALID, param, code, message=param)
    if code == "invalid_value" and param.endswith("content[0].type"):
        assert_error(server.chat(messages=[QUESTION, message]), 400, INVALID, param, code, message="text parts only")
    assert not server.engine.requests


def test_a_conversation_with_tools_through_the_client(server: RunningServer) -> None:
    source = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
        "{% endfor %}{{ message.tool_call_id }};{% endfor %}"
    )
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    messages: Any = [
        {"role": "developer", "content": "brief"},
        QUESTION,
        {"role": "assistant", "tool_calls": [call('{"a":1}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model="test", messages=messages)
        # The client's own message objects can be sent back.
        messages.append(reply.choices[0].message)
        client.chat.completions.create(model="test", messages=messages)
    start = 'system:brief;user:x;assistant:add{"a": 1};tool:2c1;'
    texts = [bytes(request.prompt_token_ids).decode() for request in server.engine.requests]
    assert texts == [start, f"{start}assistant:Hello, world;"]


def test_continuing_the_final_message(server: RunningServer) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "Sure, "}]
    for fields in ({}, {"add_generation_prompt": False}):
        server.chat(messages=messages, continue_final_message=True, **fields)
        text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nSure, "
        expected = server.context.tokenizer.encode(text, add_special_tokens=False)
        assert server.engine.requests.pop().prompt_token_ids == expected
    reply = server.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert_error(reply, 400, INVALID, "continue_final_message", "invalid_value", message="exclude each other")
    assert not server.engine.requests


def test_documents_and_special_tokens_reach_the_prompt(server: RunningServer) -> None:
    server.context.tokenizer.chat_template = ChatTemplate("{{ documents[0].text if documents else '-' }}", {})
    server.chat(documents=[{"title": "t", "text": "d"}])
    server.chat(add_special_tokens=True)
    assert [request.prompt_token_ids for request in server.engine.requests] == [[ord("d")], [256, ord("-")]]


def test_what_a_template_is_given() -> None:
    template = ChatTemplate("{{ tools[0].name }}{{ documents[0].text }}{{ messages[0].content }}{{ suffix }}.", {})
    fields = {"documents": [{"text": "d"}], "chat_template_kwargs": {"suffix": "!"}}
    body = msgspec.convert({"model": "test", "messages": [QUESTION], **fields}, ChatCompletionRequest)
    assert render_chat(body, template, tools=[{"name": "f"}]) == "fdx!."
    continued = msgspec.structs.replace(body, continue_final_message=True)
    assert render_chat(continued, template, tools=[{"name": "f"}]) == "fdx"


def roles_server(server: RunningServer, source: str) -> RunningServer:
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    return server


LLAMA_LIKE = (
    "{% for message in messages %}{% if message.role == 'tool' or message.role == 'ipython' %}<ipython>"
    "{{ message.content | tojson }}{% elif message.role in ['user', 'assistant', 'system'] %}<{{ message.role }}>"
    "{{ message.content | trim }}{% elif message.role == 'critic' %}{{ raise_exception('No critics here') }}"
    "{% endif %}{% endfor %}"
)


def test_roles_that_the_template_knows(server: RunningServer) -> None:
    """vLLM passes any role on; what the template does with it decides."""
    for content in ("x", [{"type": "text", "text": "x"}]):
        for role in ("my-custom-role", "function", "ipython"):
            assert server.chat(messages=[QUESTION, {"role": role, "content": content}]).status == 200
            text = bytes(id_ for id_ in server.engine.requests[-1].prompt_token_ids if id_ < 256).decode()
            assert text == f"user\nx\n{role}\nx\nassistant\n"
    roles_server(server, LLAMA_LIKE)
    assert server.chat(messages=[QUESTION, {"role": "ipython", "content": " 42 "}]).status == 200
    assert bytes(server.engine.requests[-1].prompt_token_ids) == b'<user>x<ipython>" 42 "'
    assert server.chat(messages=[QUESTION, {"role": "ipython", "content": '{"a": "é\\n"}\n\n'}]).status == 200


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("observation", "the chat template leaves out messages of the role 'observation'; it must be 'system'"),
        ("critic", "the chat template cannot render these messages: No critics here"),
        ("asistant", "did you mean 'assistant'?"),
    ],
)
def test_roles_that_it_does_not_know(server: RunningServer, role: str, message: str) -> None:
    messages = [QUESTION, {"role": role, "content": "y"}]
    reply = roles_server(server, LLAMA_LIKE).chat(messages=messages)
    assert_error(reply, 400, INVALID, "messages[1].role", "invalid_value", message=message)
    # A template may name a word that looks like a mistake.
    named = roles_server(server, LLAMA_LIKE.replace("'ipython'", f"'{role}'", 1))
    assert named.chat(messages=messages).status == 200
    assert len(server.engine.requests) == 1
