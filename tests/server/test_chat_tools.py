"""Tool calls and reasoning in replies, through the openai client, over an engine that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

from tests.grammars import accepts

from .conftest import RunningServer
from .engine_double import spell

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ADD: Any = {"type": "function", "function": {"name": "add"}}
TOOLS = [WEATHER, ADD]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂", "days": 2}}\n</tool_call>'
CALL_3 = '{"name": "get_weather", "parameters": {"city": "Zürich 🙂", "days": 2}}'
ARGUMENTS = {"city": "Zürich 🙂", "days": 2}


@pytest.fixture
def start(start_server: Callable[..., RunningServer]) -> Iterator[Callable[..., tuple[RunningServer, openai.OpenAI]]]:
    clients: list[openai.OpenAI] = []

    def start(**settings: Any) -> tuple[RunningServer, openai.OpenAI]:
        server = start_server(**settings)
        server.engine.max_model_len = 4096
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))
        return server, clients[-1]

    yield start
    for client in clients:
        client.close()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="test", messages=MESSAGES, **{"tools": TOOLS, **fields}).choices


def ask_streamed(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together from what the raw deltas say."""
    choices: dict[int, dict[str, Any]] = {}
    stream = client.chat.completions.create(model="test", messages=MESSAGES, stream=True, **{"tools": TOOLS, **fields})
    for chunk in stream:
        [choice] = chunk.choices
        found = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "logprobs": []})
        delta = choice.delta
        found["content"] += delta.content or ""
        reasoning = (delta.model_extra or {}).get("reasoning_content") or ""
        assert ((delta.model_extra or {}).get("reasoning") or "") == reasoning
        found["reasoning"] += reasoning
        for call in delta.tool_calls or []:
            if call.index == len(found["calls"]):
                assert call.type == "function"
                found["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
            found["calls"][call.index]["arguments"] += call.function.arguments
        found["logprobs"] += choice.logprobs.content if choice.logprobs else []
        found["finish_reason"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]


def as_streamed(choice: Any) -> dict[str, Any]:
    message: ChatCompletionMessage = choice.message
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return {
        "content": message.content or "",
        "reasoning": extra.get("reasoning_content") or "",
        "calls": [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in message.tool_calls or []
            if isinstance(call, ChatCompletionMessageFunctionToolCall)
        ],
        "logprobs": choice.logprobs.content if choice.logprobs else [],
        "finish_reason": choice.finish_reason,
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    return choice | {"calls": [{key: call[key] for key in ("name", "arguments")} for call in choice["calls"]]}


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
def test_calls(start: Any, parser: str, text: str, content: str | None, num_calls: int, width: int) -> None:
    server, client = start(tool_parser=parser)
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


def test_raw_messages(start: Any) -> None:
    server, _ = start()
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


def test_the_client_s_own_stream_helper(start: Any) -> None:
    server, client = start()
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


def test_one_call_ends_the_text(start: Any) -> None:
    server, client = start()
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


def test_several_choices_stops_and_limits(start: Any) -> None:
    server, client = start()
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


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_a_forced_call_that_is_cut_in_its_head_shows_nothing_of_its_format(start: Any, parser: str) -> None:
    server, client = start(tool_parser=parser)
    text = CALL if parser == "hermes" else CALL_3
    server.engine.script = spell(text)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for max_tokens in range(1, text.index("Z"), 3):
        for choice in ("required", named):
            [cut] = ask(client, max_tokens=max_tokens, tool_choice=choice)
            assert (cut.message.content or "", cut.finish_reason) == ("", "length")
            [streamed] = ask_streamed(client, max_tokens=max_tokens, tool_choice=choice)
            assert without_ids(streamed) == without_ids(as_streamed(cut))
    # A call that nobody forced may yet be a text.
    assert ask(client, max_tokens=9)[0].message.content == text[:9]


def test_reasoning(start: Any) -> None:
    server, client = start(reasoning_parser="qwen3")
    text = f"<think>\nIs it 日本?\n</think>\n\nYes.\n{CALL}"
    for width in (1, 5):
        server.engine.script = spell(text, width=width)
        [choice] = ask(client)
        assert choice.message.content == "Yes."
        assert choice.message.model_extra["reasoning_content"] == "Is it 日本?"
        assert choice.finish_reason == "tool_calls"
        assert without_ids(ask_streamed(client)[0]) == without_ids(as_streamed(choice))
    hidden = as_streamed(ask(client, extra_body={"include_reasoning": False})[0])
    assert (hidden["reasoning"], hidden["content"], len(hidden["calls"])) == ("", "Yes.", 1)
    left_in = as_streamed(ask(client, extra_body={"separate_reasoning": False})[0])
    assert (left_in["reasoning"], left_in["content"]) == ("", "<think>\nIs it 日本?\n</think>\n\nYes.")
    plain_server, plain = start(reasoning_parser="none")
    plain_server.engine.script = spell(text)
    assert as_streamed(ask(plain)[0])["content"].startswith("<think>")


def test_how_many_tokens_the_reasoning_had(start: Any) -> None:
    server, client = start(reasoning_parser="qwen3")
    texts = ["<think>\nhm?\n</think>\n\nYes.", "No."]
    server.engine.script = lambda request, index: [[byte] for byte in texts[index].encode()]
    fields: Any = {"model": "test", "messages": MESSAGES, "n": 2}
    for extra in ({}, {"include_reasoning": False}):
        usage = client.chat.completions.create(**fields, extra_body=extra).usage
        assert usage.completion_tokens_details.reasoning_tokens == len("\nhm?\n")
        assert usage.completion_tokens == sum(map(len, texts))
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = client.chat.completions.create(**fields, extra_body=extra, stream=True, stream_options=options)
        *chunks, last = list(stream)
        assert last.usage == usage
        by_choice = {chunk.choices[0].index: chunk.usage.completion_tokens_details for chunk in chunks}
        assert [by_choice[choice].reasoning_tokens for choice in (0, 1)] == [5, 0]
    # Where it is part of the content there is none.
    plain = client.chat.completions.create(**fields, extra_body={"separate_reasoning": False}).usage
    assert plain.completion_tokens_details is None
    completion = client.completions.create(model="test", prompt="x").usage
    assert completion.completion_tokens_details is None


def test_a_template_that_opens_the_reasoning(start: Any) -> None:
    from eventlm.server.chat_template import ChatTemplate

    server, client = start(reasoning_parser="qwen3")
    server.engine.script = spell("hm\n</think>\n\nYes.")
    source = "{{ messages[-1].content }}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    thinking = as_streamed(ask(client, tools=[], extra_body={"chat_template_kwargs": {"enable_thinking": True}})[0])
    assert (thinking["reasoning"], thinking["content"]) == ("hm", "Yes.")
    not_thinking = as_streamed(ask(client, tools=[])[0])
    assert (not_thinking["reasoning"], not_thinking["content"]) == ("", "hm\n</think>\n\nYes.")


def test_what_the_template_is_given(start: Any) -> None:
    from eventlm.server.chat_template import ChatTemplate

    server, client = start()
    server.context.tokenizer.chat_template = ChatTemplate("{{ tools | tojson if tools else 'no tools' }}", {})
    ask(client)
    ask(client, tool_choice="none")
    ask(client, tools=[])
    prompts = [bytes(request.prompt_token_ids).decode() for request in server.engine.requests]
    assert prompts == [json.dumps(TOOLS), "no tools", "no tools"]
    # Calls are looked for only where they may be.
    server.engine.script = spell(CALL)
    assert ask(client, tool_choice="none")[0].message.content == CALL


def test_a_template_without_tools(start: Any) -> None:
    server, client = start()
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


def test_what_the_decoder_just_takes_is_no_failure(start: Any) -> None:
    """What can still be read of JSON that is deep may be too deep to be written again."""
    server, _ = start()
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


def test_a_model_whose_format_is_not_known(start: Any) -> None:
    server, client = start(tool_parser="none")
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as caught:
        ask(client)
    assert caught.value.param == "tools"
    server.engine.script = spell(CALL)
    assert ask(client, tool_choice="none")[0].message.content == CALL


def test_tools_count_in_tokenize(start: Any) -> None:
    server, _ = start()
    body = {"messages": MESSAGES, "model": "test"}
    plain, tools = (server.post("/tokenize", {**body, **extra}).json() for extra in ({}, {"tools": TOOLS}))
    assert tools["count"] > plain["count"] + 100
    server.chat(tools=TOOLS)
    assert tools["tokens"] == server.engine.requests[0].prompt_token_ids


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("fields", "finish_reason", "has_text_ends"),
    [
        ({"tool_choice": "required"}, "tool_calls", False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls", False),
        ({"tool_choice": NAMED}, "stop", False),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "tool_calls", False),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
          "parallel_tool_calls": False}, "tool_calls", True),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
         "tool_calls", False),
    ],
)  # fmt: skip
def test_what_is_forced(start: Any, fields: dict[str, Any], finish_reason: str, has_text_ends: bool) -> None:
    server, client = start()
    server.engine.script = spell(CALL, width=9)
    server.engine.script_end = "grammar"
    [choice] = ask(client, **fields)
    assert choice.finish_reason == finish_reason
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    [streamed] = ask_streamed(client, **fields)
    assert without_ids(streamed) == without_ids(as_streamed(choice))
    request = server.engine.requests[0]
    assert request.waits_for_grammar
    assert request.has_text_ends == has_text_ends
    assert accepts(request.params.grammar, CALL)
    assert not accepts(request.params.grammar, CALL.replace("get_weather", "other"))
    # Without being strict, a call that is not forced may have any arguments.
    assert accepts(request.params.grammar, CALL.replace("city", "town")) == has_text_ends
    assert accepts(request.params.grammar, "Hello") == (fields.get("tool_choice") is None or has_text_ends)
    assert accepts(request.params.grammar, f"{CALL}\n{CALL}") == (
        has_text_ends or (fields.get("tool_choice") != NAMED and fields.get("parallel_tool_calls", True))
    )


def test_a_structure_for_the_content_beside_calls(start: Any) -> None:
    server, client = start()
    server.engine.script = spell('{"x": 1}')
    [choice] = ask(client, response_format={"type": "json_object"})
    assert choice.message.content == '{"x": 1}'
    grammar = server.engine.requests[0].params.grammar
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, CALL)
    assert not accepts(grammar, "Hello")


def test_a_schema_that_cannot_be_followed(start: Any) -> None:
    _, client = start()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/x"}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[ADD, tool], tool_choice="required", stream=True)
    assert caught.value.param == "tools[1].function.parameters.properties.a"
    # Where nobody has to follow it, it is the model's matter.
    assert ask(client, tools=[tool])[0].finish_reason == "stop"


class GetWeather(pydantic.BaseModel):
    """The weather of a place."""

    city: str
    days: int


def test_the_client_s_own_parsing(start: Any) -> None:
    """Tools from pydantic models are strict, and their calls come back as such models."""
    server, client = start()
    server.engine.script = spell(CALL.replace("get_weather", "GetWeather"), width=3)
    tool = openai.pydantic_function_tool(GetWeather)
    completion = client.chat.completions.parse(model="test", messages=MESSAGES, tools=[tool])
    [call] = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)
    with client.chat.completions.stream(model="test", messages=MESSAGES, tools=[tool]) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)
    assert accepts(server.engine.requests[0].params.grammar, CALL.replace("get_weather", "GetWeather"))
    assert not accepts(server.engine.requests[0].params.grammar, CALL.replace("get_weather", "GetWeather")[:-15] + "}")
