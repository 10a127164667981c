"""Tool calls in replies, through the openai client, over an engine that says what the test wants."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.engine_double import spell
from tests.server.tool_calls import (
    ADD,
    ARGUMENTS,
    CALL,
    CALL_3,
    MESSAGES,
    TOOLS,
    WEATHER,
    as_streamed,
    ask,
    ask_streamed,
    without_ids,
)


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "content", "num_calls"),
    [
        ("hermes", CALL, None, 1),
        ("hermes", f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
        ("llama3_json", f"{CALL_3}; {CALL_3}", None, 2),
        ("hermes", "Just <tool_call> text 🙂\n", "Just <tool_call> text 🙂\n", 0),
    ],
)
def test_calls(start_with_client: Any, parser: str, text: str, content: str | None, num_calls: int, width: int) -> None:
    server, client = start_with_client(tool_parser=parser)
    server.engine.script = spell(text, width=width)
    [choice] = ask(client, logprobs=True)
    assert choice.message.content == content
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS] * num_calls
    assert {call.function.name for call in calls} <= {"get_weather"}
    assert len({call.id for call in calls}) == num_calls
    assert choice.finish_reason == ("tool_calls" if num_calls else "stop")
    assert len(choice.logprobs.content) == len(text.encode())
    [streamed] = ask_streamed(client, logprobs=True)
    assert without_ids(streamed) == without_ids(as_streamed(choice))
    assert all(call["id"].startswith("call_") for call in streamed["calls"])


def test_raw_messages(start_with_client: Any) -> None:
    server, _ = start_with_client()
    server.engine.script = spell(CALL, width=1000)
    reply = server.chat(tools=TOOLS).json()
    call = reply["choices"][0]["message"]["tool_calls"][0]
    assert reply["choices"][0]["message"] == {
        "content": None,
        "role": "assistant",
        "refusal": None,
        "tool_calls": [{
            "id": call["id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Zürich 🙂", "days": 2}'},
        }],
    }  # fmt: skip
    server.engine.script = spell(CALL, width=50)
    *chunks, _ = server.chat(tools=TOOLS, stream=True).events()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert set(deltas[1]) == {"tool_calls"}
    [first] = deltas[1]["tool_calls"]
    assert set(first) == {"index", "id", "type", "function"}
    assert set(deltas[2]["tool_calls"][0]) == {"index", "function"}
    assert set(deltas[2]["tool_calls"][0]["function"]) == {"arguments"}
    assert deltas[-1] == {}


def test_the_client_s_own_stream_helper(start_with_client: Any) -> None:
    server, client = start_with_client()
    server.engine.script = spell(f"So.\n{CALL}\n{CALL}", width=2)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    with client.chat.completions.stream(model="test", messages=MESSAGES, tools=[strict]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls or []] == [ARGUMENTS] * 2
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather"] * 2
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas if event.index == 1) == done[1].arguments


def test_one_call_ends_the_text(start_with_client: Any) -> None:
    server, client = start_with_client()
    for width in (1, 7, 1000):
        server.engine.text_ends.clear()
        server.engine.script = spell(f"{CALL}\n{CALL}", width=width)
        [choice] = ask(client, parallel_tool_calls=False)
        assert len(choice.message.tool_calls) == 1
        assert choice.finish_reason == "tool_calls"
        needed = len(CALL[: CALL.index("}}") + 2].encode())
        assert [end[1:] for end in server.engine.text_ends] == [(0, needed, "tool_calls")]
        [streamed] = ask_streamed(client, parallel_tool_calls=False)
        assert without_ids(streamed) == without_ids(as_streamed(choice))
    server.engine.script = spell("No call at all.")
    server.engine.text_ends.clear()
    [choice] = ask(client, parallel_tool_calls=False)
    assert (choice.message.content, choice.finish_reason) == ("No call at all.", "stop")
    assert [end[3] for end in server.engine.text_ends] == [""]


def test_several_choices_stops_and_limits(start_with_client: Any) -> None:
    server, client = start_with_client()
    texts = ["plain", f"a{CALL}", f"{CALL}\n{CALL}"]
    server.engine.script = lambda request, index: [[byte] for byte in texts[index].encode()]
    choices = ask(client, n=3)
    assert [choice.finish_reason for choice in choices] == ["stop", "tool_calls", "tool_calls"]
    assert [len(choice.message.tool_calls or []) for choice in choices] == [0, 1, 2]
    assert len({call.id for choice in choices for call in choice.message.tool_calls or []}) == 3
    assert [without_ids(each) for each in ask_streamed(client, n=3)] == [
        without_ids(as_streamed(choice)) for choice in choices
    ]
    server.engine.script = spell(CALL)
    [cut] = ask(client, max_tokens=66)
    assert cut.finish_reason == "length"
    assert '{"city": "Zürich'.startswith(cut.message.tool_calls[0].function.arguments)
    [stopped] = ask(client, stop="rich")
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", "rich")
    assert stopped.message.tool_calls[0].function.arguments == '{"city": "Zü'
    assert without_ids(ask_streamed(client, stop="rich")[0]) == without_ids(as_streamed(stopped))


def test_what_the_template_is_given(start_with_client: Any) -> None:
    from eventlm.text.chat_template import ChatTemplate

    server, client = start_with_client()
    server.context.tokenizer.chat_template = ChatTemplate("{{ tools | tojson if tools else 'no tools' }}", {})
    ask(client)
    ask(client, tool_choice="none")
    ask(client, tools=[])
    prompts = [bytes(request.prompt_token_ids).decode() for request in server.engine.requests]
    assert prompts == [json.dumps(TOOLS), "no tools", "no tools"]
    # Calls are looked for only where they may be.
    server.engine.script = spell(CALL)
    assert ask(client, tool_choice="none")[0].message.content == CALL


def test_a_template_without_tools(start_with_client: Any) -> None:
    server, client = start_with_client()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    client.chat.completions.create(
        model="test",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
        tools=[ADD],
    )  # type: ignore[call-overload]
    prompt = server.context.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    spelled = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(ADD)}\n</tools>" in prompt
    assert prompt.endswith(
        f"<|im_start|>assistant\n{spelled}\n{spelled}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_the_decoder_just_takes_is_no_failure(start_with_client: Any) -> None:
    """What can still be read of JSON that is deep may be too deep to be written again."""
    server, _ = start_with_client()
    for depth in range(900, 1000):
        deep = "[" * depth + "]" * depth
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {deep}}}'}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        body = json.dumps({"model": "test", "messages": MESSAGES, "tool_choice": "required", "tools": ["deep"]})
        function = f'{{"name": "f", "parameters": {{"properties": {{"a": {{"enum": {deep}}}}}}}}}'
        body = body.replace('"deep"', f'{{"type": "function", "function": {function}}}')
        replies = [
            server.post("/tokenize", {"messages": messages}),
            server.post("/tokenize", body.encode()),
            server.post("/v1/chat/completions", body.encode()),
        ]
        assert {reply.status for reply in replies} <= {200, 400}


def test_a_model_whose_format_is_not_known(start_with_client: Any) -> None:
    server, client = start_with_client(tool_parser="none")
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
        ask(client)
    assert caught.value.param == "tools"
    server.engine.script = spell(CALL)
    assert ask(client, tool_choice="none")[0].message.content == CALL


def test_tools_count_in_tokenize(start_with_client: Any) -> None:
    server, _ = start_with_client()
    body = {"messages": MESSAGES, "model": "test"}
    plain, tools = (server.post("/tokenize", {**body, **extra}).json() for extra in ({}, {"tools": TOOLS}))
    assert tools["count"] > plain["count"] + 100
    server.chat(tools=TOOLS)
    assert tools["tokens"] == server.engine.requests[0].prompt_token_ids
