"""The sampling parameters of a chat by name: those that a request to /v1/chat/completions takes."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

import msgspec

from eventlm.config.load import lower_first
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError

#: Fields of a request that a chat sets itself, or that make no sense for one answer shown as text.
_NOT_SETTINGS = frozenset(
    {
        "model", "messages", "stream", "stream_options", "n", "logprobs", "top_logprobs", "prompt_logprobs",
        "add_generation_prompt", "add_special_tokens", "continue_final_message", "echo", "return_token_ids",
        "return_tokens_as_token_ids", "response_format", "structured_outputs", "guided_json",
        "guided_regex", "guided_choice", "guided_grammar", "tools", "tool_choice", "parallel_tool_calls",
    }
)  # fmt: skip


@functools.cache
def settings() -> MappingProxyType[str, Any]:
    """Every parameter that can be set, and its type."""
    from eventlm.text.protocol import ChatCompletionRequest

    fields = msgspec.structs.fields(ChatCompletionRequest)
    return MappingProxyType({field.name: field.type for field in fields if field.name not in _NOT_SETTINGS})


def parse_setting(name: str, text: str) -> Any:
    """The value of parameter `name` that `text` stands for: JSON, or a bare string.

    Raises UsageError that names the nearest parameter or says what the value must be.
    """
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return _check(name, text)
    try:
        return _check(name, value)
    except UsageError:
        # A stop string may look like a number.
        if _converts(text, settings().get(name)):
            return text
        raise


def check_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The parameters among the fields of a request's body, without those that a chat sets itself. Raises UsageError."""
    return {name: _check(name, value) for name, value in values.items() if name not in _NOT_SETTINGS}


def check_name(name: str) -> None:
    """Raise UsageError for an unknown parameter."""
    if name not in settings():
        raise UsageError(f"unknown parameter {name!r}{did_you_mean(name, sorted(settings()), listed_as='known')}")


def shown(value: Any) -> str:
    """A value as `parse_setting` reads it."""
    return msgspec.json.encode(value).decode()


def _check(name: str, value: Any) -> Any:
    check_name(name)
    try:
        msgspec.convert(value, settings()[name])
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {lower_first(str(error))}") from error
    return value


def _converts(value: str, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except (msgspec.ValidationError, TypeError):
        return False
    return True
