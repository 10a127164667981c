"""Parsers are found by name, in other packages too, and by the chat template."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.tools.formats import DeepSeekR1, Hermes, Llama3Json, Qwen3, find_formats
from eventlm.text.tools.message import CallDelta, MessageFormat
from tests.text.tools.cuttings import parse_message

QWEN = "{{ tools }}<tool_call>\n{{ '</think>' }}"
LLAMA_32 = """{{ '{"name": "' + name + '", "parameters": ' }}ipython{{ tools }}"""
PLUGIN = '''
from eventlm.text.tools.call_parser import CallSyntax
from eventlm.text.tools.formats import ToolFormat


class Brackets(ToolFormat):
    """Calls between double brackets."""

    syntax = CallSyntax(begin="[[", end="]]", layout=("[[", "]]"), separator="")

    @classmethod
    def detects(cls, template):
        return False


class Other:
    pass
'''


def found(source: str | None = None, tool_parser: str = "auto", reasoning_parser: str = "auto") -> tuple[type, type]:
    template = ChatTemplate(source, {}) if source is not None else None
    formats = find_formats(ServerConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser), template)
    return type(formats.tools), type(formats.reasoning)


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        (QWEN, Hermes, Qwen3),
        ("{{ tools }}<|python_tag|>", Llama3Json, type(None)),
        (LLAMA_32, Llama3Json, type(None)),
        # No tools at all: the prompt gets them as text.
        ("{{ messages }}", Hermes, type(None)),
        # Other formats than ours.
        ("{{ tools }}[TOOL_CALLS]", type(None), type(None)),
        ("{{ tools }}<tool_call>\n<function=f>", type(None), type(None)),
        (None, type(None), type(None)),
    ],
)
def test_by_the_template(source: str | None, tools: type, reasoning: type) -> None:
    assert found(source) == (tools, reasoning)


def test_by_name() -> None:
    assert found(QWEN, "llama3_json", "deepseek_r1") == (Llama3Json, DeepSeekR1)
    assert found(QWEN, "none", "none") == (type(None), type(None))
    assert found(None, "hermes", "qwen3") == (Hermes, Qwen3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_parser": "hermis"}, "--tool-parser: unknown parser 'hermis'; did you mean hermes?"),
        ({"reasoning_parser": "r1"}, "known: qwen3, deepseek_r1"),
        ({"tool_parser": "nowhere:X"}, "no module 'nowhere'"),
        ({"tool_parser": "eventlm.text.tools.formats:Qwen3"}, "derived from eventlm.text.tools.formats.ToolFormat"),
    ],
)
def test_errors(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_formats(ServerConfig(**settings), None)
    assert message in str(caught.value)


def test_from_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_parsers.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[eventlm.tool_parsers]\nbrackets = their_parsers:Brackets\nother = their_parsers:Other\n"
    )
    assert "brackets" in {point.name for point in metadata.entry_points(group="eventlm.tool_parsers")}
    formats = find_formats(ServerConfig(tool_parser="brackets"), None)
    text = 'So [[{"name": "f", "arguments": {"a": 1}}]]'
    message, _ = parse_message(text, MessageFormat(tool_names=("f",)), formats)
    assert (message.content, message.calls) == ("So", [CallDelta(0, "f", '{"a": 1}')])
    with pytest.raises(UsageError, match="derived from"):
        find_formats(ServerConfig(tool_parser="other"), None)
    with pytest.raises(UsageError, match="brackets"):
        find_formats(ServerConfig(tool_parser="bracket"), None)


@pytest.mark.parametrize(
    ("prompt_end", "state"),
    [
        ("<|assistant|>\n", "possible"),
        ("<|assistant|>\n<think>\n", "open"),
        ("<think>\n\n</think>\n\n", "closed"),
        ("", "possible"),
    ],
)
def test_the_end_of_a_prompt_shows_whether_reasoning_follows(prompt_end: str, state: str) -> None:
    assert Qwen3().state(prompt_end) == state


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ("", "possible"),
        (" \n", "possible"),
        ("Hello", "closed"),
        ("<think>Well", "open"),
        ("<think>Well</think>", "closed"),
        ("</think><think>", "open"),
    ],
)
def test_a_begun_message_shows_whether_reasoning_follows(message: str, state: str) -> None:
    assert Qwen3().state_within(message) == state
