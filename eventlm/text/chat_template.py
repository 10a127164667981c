"""Chat templates, rendered as transformers renders them.

The environment is that of `PreTrainedTokenizerBase.apply_chat_template`: Jinja in its immutable sandbox, block
trimming, loop controls, `{% generation %}` blocks, `raise_exception`, `strftime_now` and an unescaped `tojson`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eventlm.errors import CheckpointError, EventLMError

#: Names that a request cannot set.
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now"}
)

#: Appended to a message that is to be continued, to find its end in the text. Templates that trim remove its space.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(EventLMError):
    """A template refused the messages, or cannot be rendered with them."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training. It does not change the rendered text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class TemplateSource:
    """The text of a template. knows_developer, knows_tools: whether it mentions the developer role, and tools."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.knows_developer = "developer" in source
        self.knows_tools = "tool" in source


class ChatTemplate(TemplateSource):
    """A compiled chat template with the special tokens of its tokenizer (`bos_token`, `eos_token`, ...).

    Raises CheckpointError for a source that does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        super().__init__(source)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"it does not compile: {line}{error}") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`. Raises ChatTemplateError with the template's own message.

        With `continue_final_message` it ends where the last message's content ends; its trailing space stays if the
        template keeps it.
        """
        if continue_final_message:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _END_MARK}]
        text = self._render(
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, arguments: dict[str, Any]) -> str:
        try:
            return self._template.render(arguments)
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply for the chat template") from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
