"""The formats of tool calls and of reasoning: plug-ins, found by name or by the model's chat template.

A name is a built-in one, that of an entry point in the group `eventlm.tool_parsers` or `eventlm.reasoning_parsers`,
or `module:Class`. `auto` takes the first built-in format that recognises the template, `none` takes none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from eventlm.config import ServerConfig
from eventlm.config.options import did_you_mean
from eventlm.engine.plugins.registry import load_class
from eventlm.errors import UsageError
from eventlm.text.chat_template import ChatTemplate
from eventlm.text.tools.call_parser import CallParser, CallSyntax
from eventlm.text.tools.pieces import TextMachine

#: Of a text that is about to come: no reasoning, perhaps some, or it begins within it.
ReasoningState = Literal["closed", "possible", "open"]
AUTO, NONE = "auto", "none"


class ToolFormat(ABC):
    """How a family of models writes tool calls. Has no state; made without arguments."""

    syntax: CallSyntax

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether this is what the chat template (its source) teaches."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens of a vocabulary, and has to be seen in the text all the same."""
        return (self.syntax.begin, self.syntax.end)

    def parser(self, names: Container[str]) -> TextMachine:
        """What finds the calls of the tools `names` in one text."""
        return CallParser(self.syntax, names)


class ReasoningFormat(ABC):
    """How a family of models marks its reasoning. Has no state; made without arguments."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be special tokens of a vocabulary, and has to be seen in the text all the same."""
        return (self.begin, self.end)

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether the chat template (its source) knows these marks."""

    @abstractmethod
    def parser(self, *, is_open: bool) -> TextMachine:
        """What splits reasoning off one text, which begins within it or before it."""

    def state(self, prompt_end: str) -> ReasoningState:
        """What comes behind a prompt that ends so: some templates open the reasoning themselves, or close it."""
        end = prompt_end.rstrip()
        if end.endswith(self.begin):
            return "open"
        return "closed" if end.endswith(self.end) else "possible"

    def state_within(self, message: str) -> ReasoningState:
        """What comes where a message that has begun goes on."""
        if message.rfind(self.begin) > message.rfind(self.end):
            return "open"
        return "closed" if message.strip() else "possible"


class _Kind(NamedTuple):
    """One of the two kinds of plug-ins, with the option that names one."""

    option: str
    entry_points: str
    base: type[ToolFormat] | type[ReasoningFormat]
    built_in: Mapping[str, str]


_TOOLS = _Kind(
    "tool_parser",
    "eventlm.tool_parsers",
    ToolFormat,
    MappingProxyType(
        {
            "hermes": "eventlm.text.tools.hermes:Hermes",
            "llama3_json": "eventlm.text.tools.llama3_json:Llama3Json",
        }
    ),
)
_REASONING = _Kind(
    "reasoning_parser",
    "eventlm.reasoning_parsers",
    ReasoningFormat,
    MappingProxyType(
        {
            "qwen3": "eventlm.text.tools.think:Qwen3",
            "deepseek_r1": "eventlm.text.tools.think:DeepSeekR1",
        }
    ),
)


class Formats(NamedTuple):
    """What this server looks for in replies; None: nothing."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None


NO_FORMATS = Formats(None, None)


def find_formats(config: ServerConfig, template: ChatTemplate | None) -> Formats:
    """The formats that the options name, else those that the chat template shows. Raises UsageError.

    Models whose template does not know tools are taught the first built-in format (see `teaching.py`).
    """
    source = template.source if template is not None else ""
    tools = _find(_TOOLS, config.tool_parser, source)
    if tools is None and config.tool_parser == AUTO and template is not None and not template.knows_tools:
        tools = _load(_TOOLS, AUTO, next(iter(_TOOLS.built_in.values())))
    return Formats(tools, _find(_REASONING, config.reasoning_parser, source))


def _find(kind: _Kind, name: str, template: str) -> Any:
    if name == NONE:
        return None
    if name != AUTO:
        return _load(kind, name, _reference(kind, name))
    for built_in, reference in kind.built_in.items():
        found = _load(kind, built_in, reference)
        if found.detects(template):
            return found
    return None


def _load(kind: _Kind, name: str, reference: str) -> Any:
    plugin_class, base = load_class(name, reference), kind.base
    if not (isinstance(plugin_class, type) and issubclass(plugin_class, base)):
        raise UsageError(f"{_flag(kind)} {name}: it must be a class derived from {base.__module__}.{base.__name__}")
    return plugin_class()


def _reference(kind: _Kind, name: str) -> str:
    if ":" in name:
        return name
    if name in kind.built_in:
        return kind.built_in[name]
    third_party = {point.name: point.value for point in metadata.entry_points(group=kind.entry_points)}
    if name in third_party:
        return third_party[name]
    known = [*kind.built_in, *sorted(third_party)]
    hint = did_you_mean(name, known, listed_as="known") + f", {AUTO}, {NONE}"
    raise UsageError(f"{_flag(kind)}: unknown parser {name!r}{hint}; a local one is written module:Class")


def _flag(kind: _Kind) -> str:
    return "--" + kind.option.replace("_", "-")
