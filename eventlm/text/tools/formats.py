"""The formats of tool calls and of reasoning: built-in ones and plug-ins, found by name or by the chat template.

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
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.call_parser import CallParser, CallSyntax
from eventlm.text.tools.parser_events import StreamParser
from eventlm.text.tools.reasoning_parser import ReasoningParser

#: Of the text after a prompt: it has no reasoning, may begin with some, or begins within it.
ReasoningState = Literal["closed", "possible", "open"]
AUTO, NONE = "auto", "none"
#: Formats that put something else between Hermes's tags: Qwen3-Coder, GLM-4.5.
_NOT_HERMES = ("<function=", "<arg_key>")


class ToolFormat(ABC):
    """How a family of models writes tool calls. Has no state; made without arguments."""

    syntax: CallSyntax

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether a chat template (its source) uses this format."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a vocabulary and must appear in the text nevertheless."""
        return (self.syntax.begin, self.syntax.end)

    def parser(self, names: Container[str]) -> StreamParser:
        """A parser that finds the calls of the tools `names` in one text."""
        return CallParser(self.syntax, names)


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes 2 and 3, Qwen 2.5 and 3, and many others."""

    syntax = CallSyntax(
        begin="<tool_call>", end="</tool_call>", layout=("<tool_call>\n", "\n</tool_call>"), separator="\n"
    )

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.syntax.begin in template and not any(other in template for other in _NOT_HERMES)


class Llama3Json(ToolFormat):
    """`{"name": ..., "parameters": ...}`, alone or after `<|python_tag|>`: Llama 3.1, 3.2 and 3.3.

    A reply is a call from its first character on; several are separated by semicolons.
    """

    syntax = CallSyntax(
        begin="<|python_tag|>", arguments_key="parameters", is_bare=True, layout=("", ""), separator="; "
    )

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.syntax.begin in template or ("ipython" in template and '"parameters": ' in template)


class ReasoningFormat(ABC):
    """How a family of models marks its reasoning. Has no state; made without arguments."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a vocabulary and must appear in the text nevertheless."""
        return (self.begin, self.end)

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether a chat template (its source) uses these marks."""

    def parser(self, *, is_open: bool) -> StreamParser:
        """A parser that separates the reasoning of one text, which begins within it or before it."""
        return ReasoningParser(self.begin, self.end, is_open=is_open)

    def state(self, prompt_end: str) -> ReasoningState:
        """The state after a prompt that ends so: some templates open the reasoning themselves, or close it."""
        end = prompt_end.rstrip()
        if end.endswith(self.begin):
            return "open"
        return "closed" if end.endswith(self.end) else "possible"

    def state_within(self, message: str) -> ReasoningState:
        """The state at the end of a message that is to be continued."""
        if message.rfind(self.begin) > message.rfind(self.end):
            return "open"
        return "closed" if message.strip() else "possible"


class Qwen3(ReasoningFormat):
    """Models that decide themselves whether to reason, unless the prompt did: Qwen3 and its kin."""

    begin = "<think>"
    end = "</think>"

    @classmethod
    def detects(cls, template: str) -> bool:
        return cls.end in template


class DeepSeekR1(Qwen3):
    """Models that always reason, and may leave out the opening tag: DeepSeek-R1 and its distillations."""

    def state(self, prompt_end: str) -> ReasoningState:
        found = super().state(prompt_end)
        return "open" if found == "possible" else found


class _Kind(NamedTuple):
    """One of the two kinds of plug-ins, with the option that names one."""

    option: str
    entry_points: str
    base: type[ToolFormat] | type[ReasoningFormat]
    built_in: Mapping[str, type[ToolFormat] | type[ReasoningFormat]]


_TOOLS = _Kind(
    "tool_parser",
    "eventlm.tool_parsers",
    ToolFormat,
    MappingProxyType({"hermes": Hermes, "llama3_json": Llama3Json}),
)
_REASONING = _Kind(
    "reasoning_parser",
    "eventlm.reasoning_parsers",
    ReasoningFormat,
    MappingProxyType({"qwen3": Qwen3, "deepseek_r1": DeepSeekR1}),
)


class Formats(NamedTuple):
    """The formats that are looked for in replies; None: none."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    def special_marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """The marks of the formats that are special tokens of the vocabulary, by their ids."""
        marks = {mark.encode(): mark for format in self if format is not None for mark in format.marks if mark}
        return {token_id: marks[data] for token_id, data in tokenizer.special_bytes.items() if data in marks}


NO_FORMATS = Formats(None, None)


def find_formats(config: ServerConfig, template: ChatTemplate | None) -> Formats:
    """The formats that the options name, else those that the chat template uses. Raises UsageError.

    Models whose template does not know tools get the first built-in format (see `tool_prompt.py`).
    """
    source = template.source if template is not None else ""
    tools = _find(_TOOLS, config.tool_parser, source)
    if tools is None and config.tool_parser == AUTO and template is not None and not template.knows_tools:
        tools = Hermes()
    return Formats(tools, _find(_REASONING, config.reasoning_parser, source))


def _find(kind: _Kind, name: str, template: str) -> Any:
    if name == NONE:
        return None
    if name == AUTO:
        return next((built_in() for built_in in kind.built_in.values() if built_in.detects(template)), None)
    if name in kind.built_in:
        return kind.built_in[name]()
    flag = "--" + kind.option.replace("_", "-")
    third_party = {point.name: point.value for point in metadata.entry_points(group=kind.entry_points)}
    if ":" not in name and name not in third_party:
        hint = did_you_mean(name, [*kind.built_in, *sorted(third_party)], listed_as="known") + f", {AUTO}, {NONE}"
        raise UsageError(f"{flag}: unknown parser {name!r}{hint}; a local one is written module:Class")
    plugin_class = load_class(name, third_party.get(name, name))
    if not (isinstance(plugin_class, type) and issubclass(plugin_class, kind.base)):
        raise UsageError(f"{flag} {name}: it must be a class derived from {kind.base.__module__}.{kind.base.__name__}")
    return plugin_class()
