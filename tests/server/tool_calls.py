"""Tools, a call of one, and replies in a form in which streams and whole replies are the same."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

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
