"""What a parser finds in an assistant's text, in the order of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import AnyStr, Union

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text that is shown to the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallStart(Struct, frozen=True):
    """A call of the tool `name` begins. The events until `CallEnd` are of this call."""

    name: str


class CallArguments(Struct, frozen=True):
    """Part of the call's arguments as the model wrote them: the text of a JSON object, if the model made no mistake."""

    text: str


class CallEnd(Struct, frozen=True):
    """The call is complete. A call that the end of the text cuts short has no such event."""


ParserEvent = Union[Content, Reasoning, CallStart, CallArguments, CallEnd]  # noqa: UP007


class StreamParser(ABC):
    """Parses one text that comes in pieces of any length. Accepts any text without raising."""

    @abstractmethod
    def push(self, text: str) -> list[ParserEvent]:
        """The events that are certain now; text that is still ambiguous is held back."""

    @abstractmethod
    def close(self) -> list[ParserEvent]:
        """The rest, at the end of the text. Nothing is pushed afterwards."""


def partial_suffix(text: AnyStr, tag: AnyStr) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    if not tag:
        return 0
    start = text.find(tag[:1], max(0, len(text) - len(tag) + 1))
    while start >= 0 and not tag.startswith(text[start:]):
        start = text.find(tag[:1], start + 1)
    return len(text) - start if start >= 0 else 0
