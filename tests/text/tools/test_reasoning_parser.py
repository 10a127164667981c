"""Reasoning is separated from content."""

from __future__ import annotations

import pytest

from eventlm.text.chat_template import ChatTemplate
from eventlm.text.tools.formats import DeepSeekR1, Qwen3
from eventlm.text.tools.message import MessageFormat
from tests.text.tools.cuttings import formats, parse_message

TEMPLATE = ChatTemplate(
    "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    "{{ '<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n' }}",
    {},
)


@pytest.mark.parametrize(
    ("state", "text", "reasoning", "content"),
    [
        ("possible", "<think>\nhm, 🙂\n</think>\n\nYes.", "hm, 🙂", "Yes."),
        ("possible", "\n<think>hm</think>Yes.\n", "hm", "Yes.\n"),
        ("possible", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("possible", "Yes <think>no</think>", "", "Yes <think>no</think>"),
        ("possible", "<thin", "", "<thin"),
        ("possible", "<think>\nhm", "hm", ""),
        ("possible", "<think>\nhm\n</thi", "hm\n</thi", ""),
        ("possible", "", "", ""),
        ("open", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("open", "<think>\nhm\n</think>Yes.", "hm", "Yes."),
        ("open", "hm", "hm", ""),
        ("closed", "<think>hm</think>Yes.", "", "<think>hm</think>Yes."),
    ],
)
def test_reasoning(state, text: str, reasoning: str, content: str) -> None:
    message, _ = parse_message(text, MessageFormat(reasoning=state), formats("none", "qwen3"))
    assert (message.reasoning, message.content) == (reasoning, content)


def test_whether_the_prompt_opens_it() -> None:
    assert Qwen3.detects(TEMPLATE.source)
    messages = [{"role": "user", "content": "<think> is a tag"}]
    opened, closed = (TEMPLATE.render(messages, variables={"thinks": thinks}) for thinks in (True, False))
    assert [Qwen3().state(prompt) for prompt in (opened, closed, "assistant\n")] == ["open", "closed", "possible"]
    assert [DeepSeekR1().state(prompt) for prompt in (opened, closed, "assistant\n")] == ["open", "closed", "open"]


@pytest.mark.parametrize(
    ("message", "state"),
    [("<think>\nhm, ", "open"), ("<think>hm</think> Y", "closed"), ("Yes", "closed"), ("\n", "possible")],
)
def test_a_message_that_goes_on(message: str, state: str) -> None:
    assert Qwen3().state_within(message) == state
