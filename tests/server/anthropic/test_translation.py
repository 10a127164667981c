"""From conversations in Anthropic's form to prompts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from eventlm.errors import InputError, InvalidJsonError, PromptTooLongError
from eventlm.server.anthropic.protocol import MessagesRequest
from eventlm.server.anthropic.translation import chat_request, own_errors
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tools.formats import NO_FORMATS, Formats, Hermes, Qwen3
from tests.server.anthropic.conversations import ADD, WEATHER

USER = {"role": "user", "content": "hi"}
CALL: Any = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "toolu_1"}


def text(words: str, **fields: Any) -> Any:
    return {"type": "text", "text": words, **fields}


def chat(template: str = "", formats: Formats = NO_FORMATS, **fields: Any) -> ChatCompletionRequest:
    raw = {"model": "test", "max_tokens": 9, "messages": [USER], **fields}
    return chat_request(msgspec.convert(raw, MessagesRequest), ChatTemplate(template, {}), formats)


def told(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The messages, without what is None."""
    messages = []
    for message in msgspec.to_builtins(request.messages):
        kept = {name: value for name, value in message.items() if value is not None}
        kept["calls"] = [(each["id"], *each["function"].values()) for each in kept.pop("tool_calls", [])]
        messages.append({name: value for name, value in kept.items() if value or name == "content"})
    return messages


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({}, [USER]),
        ({"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER]),
        (
            {"system": [text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]},
            [{"role": "system", "content": "Be brief.\nBe kind."}, USER],
        ),
        ({"system": []}, [USER]),
        (
            {"system": [text("x-anthropic-billing-header: cc_version=2; cch=1a2b3;"), text("Be brief.")]},
            [{"role": "system", "content": "Be brief."}, USER],
        ),
        (
            {"system": "x-anthropic-billing-header: cch=1a2b3;\nBe brief."},
            [{"role": "system", "content": "Be brief."}, USER],
        ),
        # A system message amid the conversation.
        (
            {"messages": [USER, {"role": "system", "content": [text("Now be long.")]}, USER]},
            [USER, {"role": "system", "content": "Now be long."}, USER],
        ),
        # Turns.
        (
            {"messages": [USER, {"role": "user", "content": [text("and"), text("bye")]}]},
            [{"role": "user", "content": "hi\nand\nbye"}],
        ),
        ({"messages": [USER, {"role": "user", "content": []}]}, [USER]),
        # A call and its results.
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [text("So."), CALL, {**CALL, "id": "toolu_2"}]},
                    {
                        "role": "user",
                        "content": [
                            {**RESULT, "content": "2"},
                            {**RESULT, "tool_use_id": "toolu_2", "content": [text("2"), text("3")], "is_error": True},
                            text("Go on."),
                        ],
                    },
                ]
            },
            [
                USER,
                {
                    "role": "assistant",
                    "content": "So.",
                    "calls": [("toolu_1", "add", '{"a":1}'), ("toolu_2", "add", '{"a":1}')],
                },
                {"role": "tool", "content": "2", "tool_call_id": "toolu_1"},
                {"role": "tool", "content": "Error: 2\n3", "tool_call_id": "toolu_2"},
                {"role": "user", "content": "Go on."},
            ],
        ),
        (
            {"messages": [{"role": "user", "content": [text("First."), RESULT, text("Then.")]}]},
            [
                {"role": "user", "content": "First."},
                {"role": "tool", "content": "", "tool_call_id": "toolu_1"},
                {"role": "user", "content": "Then."},
            ],
        ),
        # Reasoning that is passed back.
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "text", "text": "Yes.", "citations": None},
                        ],
                    },
                    USER,
                ]
            },
            [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, USER],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, text("Yes."), CALL]},
                    {"role": "user", "content": [{**RESULT, "content": "2"}]},
                ]
            },
            [
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "reasoning_content": "Hm.\nSo.",
                    "calls": [("toolu_1", "add", '{"a":1}')],
                },
                {"role": "tool", "content": "2", "tool_call_id": "toolu_1"},
            ],
        ),
    ],
)
def test_messages(fields: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    request = chat(**fields)
    assert told(request) == messages
    assert not request.continue_final_message


def test_a_long_turn_takes_time_in_proportion() -> None:
    num_messages = 20_000
    begun = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, text("word " * 100), CALL]}
    started = time.process_time()
    [_, turn, _] = chat(messages=[USER, *[begun] * num_messages, USER]).messages
    # Time that grew with the square would be minutes.
    assert time.process_time() - started < 5
    assert turn.content == "\n".join(["word " * 100] * num_messages)
    assert (turn.reasoning_content or "").count("Hm.") == len(turn.tool_calls or []) == num_messages


def test_a_reply_that_is_begun_is_continued() -> None:
    begun = [{"role": "assistant", "content": "The best answer is ("}]
    request = chat(messages=[USER, *begun])
    assert (told(request)[-1], request.continue_final_message) == (begun[0], True)


@pytest.mark.parametrize(
    ("fields", "tools", "choice", "parallel"),
    [
        ({}, None, None, None),
        ({"tools": [ADD]}, [{"name": "add", "parameters": {"type": "object"}}], None, None),
        (
            {"tools": [{**WEATHER, "type": "custom", "strict": True}], "tool_choice": {"type": "auto"}},
            [
                {
                    "name": "get_weather",
                    "description": "The weather of a place",
                    "parameters": WEATHER["input_schema"],
                    "strict": True,
                }
            ],
            "auto",
            True,
        ),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, None, "required", False),
        ({"tool_choice": {"type": "none"}}, None, "none", True),
        (
            {"tool_choice": {"type": "tool", "name": "add"}},
            None,
            {"type": "function", "function": {"name": "add"}},
            True,
        ),
    ],
)
def test_tools(fields: dict[str, Any], tools: Any, choice: Any, parallel: bool | None) -> None:
    request = chat(**fields)
    wrapped = tools and [{"type": "function", "function": function} for function in tools]
    assert (request.tools, request.tool_choice, request.parallel_tool_calls) == (wrapped, choice, parallel)


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
        ({"type": "between_tools"}, False),
    ],
)
def test_thinking(thinking: dict[str, Any], is_on: bool) -> None:
    request = chat(thinking=thinking)
    assert request.chat_template_kwargs == {"enable_thinking": is_on, "thinking": is_on}
    assert request.include_reasoning is is_on
    assert chat().chat_template_kwargs is None


def test_a_budget_is_for_models_that_reason() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert chat(thinking=thinking).thinking_token_budget is None
    assert chat(formats=Formats(Hermes(), Qwen3()), thinking=thinking).thinking_token_budget == 2048
    assert chat(formats=Formats(None, Qwen3()), thinking={"type": "adaptive"}).thinking_token_budget is None


def test_effort_is_for_templates_that_read_it() -> None:
    efforts = ("low", "medium", "high", "xhigh", "max")
    found = [chat("{{ reasoning_effort }}", output_config={"effort": effort}).reasoning_effort for effort in efforts]
    assert found == ["low", "medium", "high", "high", "high"]
    assert chat("", output_config={"effort": "low"}).reasoning_effort is None


def test_the_template_s_own_variables() -> None:
    request = chat(thinking={"type": "adaptive"}, chat_template_kwargs={"thinking": "a lot", "tone": "kind"})
    assert request.chat_template_kwargs == {"enable_thinking": True, "thinking": "a lot", "tone": "kind"}


def test_sampling_and_format() -> None:
    schema = {"type": "object"}
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=7,
        ignore_eos=True,
        repetition_penalty=1.5,
        stop_sequences=["x"],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    fields: Any = request
    assert (fields.temperature, fields.top_p, fields.top_k, request.stop) == (0.5, 0.9, 3, ["x"])
    assert (fields.min_p, fields.seed, fields.ignore_eos, fields.repetition_penalty) == (0.1, 7, True, 1.5)
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert request.response_format.json_schema.schema == schema


def test_errors_have_the_names_of_the_body() -> None:
    for param, message, expected in (
        ("tools[3].function.parameters.a", "'tools[3].function.parameters.a': no", "'tools[3].input_schema.a': no"),
        ("tools[0].function.name", "'tools[0].function.name': no", "'tools[0].name': no"),
        ("top_p", "'top_p': no", "'top_p': no"),
        (
            "min_p",
            "'min_p' excludes 'stop' and 'tools[1].function.x'",
            "'min_p' excludes 'stop_sequences' and 'tools[1].x'",
        ),
    ):
        with pytest.raises(InputError) as caught, own_errors():
            raise InputError(param, message)
        assert str(caught.value) == expected
    for num_tokens, expected in ((12, "prompt is too long: 12 tokens > 10 maximum"), (0, "too long")):
        with pytest.raises(PromptTooLongError) as caught, own_errors():
            raise PromptTooLongError("messages", "too long", num_tokens, 10)
        assert (str(caught.value), caught.value.code) == (expected, "context_length_exceeded")


def test_input_that_is_nested_too_deeply() -> None:
    called = {"role": "assistant", "content": [CALL]}
    body = msgspec.convert({"model": "test", "max_tokens": 9, "messages": [called, USER]}, MessagesRequest)
    call: Any = body.messages[0].content[0]
    for _ in range(5000):
        call.input = {"a": call.input}
    with pytest.raises(InvalidJsonError, match="nested too deeply"):
        chat_request(body, None, NO_FORMATS)
