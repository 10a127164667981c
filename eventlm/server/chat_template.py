"""Chat templates, rendered as transformers renders them, without importing it.

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

#: Names that a template is given by the server; a request cannot replace them.
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class ChatTemplateError(EventLMError):
    """A template refused the messages, or cannot be rendered with them."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; for rendering it is transparent."""

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


class ChatTemplate:
    """A compiled chat template with the special tokens of its tokenizer (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`. Raises ChatTemplateError with the template's own message."""
        arguments = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(arguments)
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply for the chat template") from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error
