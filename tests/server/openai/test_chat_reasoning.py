"""Reasoning in replies, through the openai client."""

from __future__ import annotations

from typing import Any

from tests.server.engine_double import spell
from tests.server.tool_calls import (
    CALL,
    MESSAGES,
    as_streamed,
    ask,
    ask_streamed,
    without_ids,
)


def test_reasoning(start_with_client: Any) -> None:
    server, client = start_with_client(reasoning_parser="qwen3")
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
    plain_server, plain = start_with_client(reasoning_parser="none")
    plain_server.engine.script = spell(text)
    assert as_streamed(ask(plain)[0])["content"].startswith("<think>")


def test_how_many_tokens_the_reasoning_had(start_with_client: Any) -> None:
    server, client = start_with_client(reasoning_parser="qwen3")
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


def test_a_template_that_opens_the_reasoning(start_with_client: Any) -> None:
    from eventlm.text.chat_template import ChatTemplate

    server, client = start_with_client(reasoning_parser="qwen3")
    server.engine.script = spell("hm\n</think>\n\nYes.")
    source = "{{ messages[-1].content }}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    server.context.tokenizer.chat_template = ChatTemplate(source, {})
    thinking = as_streamed(ask(client, tools=[], extra_body={"chat_template_kwargs": {"enable_thinking": True}})[0])
    assert (thinking["reasoning"], thinking["content"]) == ("hm", "Yes.")
    not_thinking = as_streamed(ask(client, tools=[])[0])
    assert (not_thinking["reasoning"], not_thinking["content"]) == ("", "hm\n</think>\n\nYes.")
