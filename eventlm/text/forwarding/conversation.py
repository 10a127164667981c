"""A conversation as one text, whose tokens stand for those of the prompt that a backend writes of it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

#: Before each part. JSON has no such character, so that nothing within a part is taken for a beginning.
_SEPARATOR = "\x1e"
#: What templates write before the messages, in this order.
_BEFORE_MESSAGES = ("chat_template", "chat_template_kwargs", "reasoning_effort", "tools", "documents")
#: Pictures and sounds are told apart by so many bytes of a hash: their own would count as thousands of tokens.
_DIGEST_BYTES = 16


def conversation_text(fields: Mapping[str, Any]) -> str:
    """The text of a chat's body. That of a conversation's beginning is a beginning of it."""
    before = {name: fields[name] for name in _BEFORE_MESSAGES if fields.get(name)}
    parts = [before] if before else []
    return "".join(_SEPARATOR + _text(part) for part in [*parts, *map(_message, fields.get("messages", []))])


def _message(message: Mapping[str, Any]) -> list[Any]:
    rest = {name: value for name, value in message.items() if value is not None and name not in ("role", "content")}
    content = message.get("content")
    parts = [_part(each) for each in content] if isinstance(content, list) else content
    return [message.get("role"), parts, rest] if rest else [message.get("role"), parts]


def _part(part: Any) -> Any:
    """A part of a message: its text, or what stands for it."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    return blake2b(_text(part).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
