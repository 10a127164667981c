"""What a text machine finds in an assistant's text, in the order of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import AnyStr, Union

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text that is shown to the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text that the model wrote to think."""

    text: str


class CallBegins(Struct, frozen=True):
    """A call of the tool `name` begins. What follows until `CallEnds` is of this call."""

    name: str


class CallArguments(Struct, frozen=True):
    """A piece of the call's arguments, as the model wrote them: the text of a JSON object, if it made no mistake."""

    text: str


class CallEnds(Struct, frozen=True):
    """The call is complete. One that the end of the text cuts short has no such piece."""


Piece = Union[Content, Reasoning, CallBegins, CallArguments, CallEnds]  # noqa: UP007


class TextMachine(ABC):
    """Takes one text in pieces of any length. It raises nothing, whatever the text."""

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """What is certain now that `text` has come; what is not is held back."""

    @abstractmethod
    def close(self) -> list[Piece]:
        """The rest, at the end of the text. Nothing is pushed afterwards."""


def partial_suffix(text: AnyStr, tag: AnyStr) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    if not tag:
        return 0
    first = tag[:1]
    place = text.find(first, max(0, len(text) - len(tag) + 1))
    while place >= 0 and not tag.startswith(text[place:]):
        place = text.find(first, place + 1)
    return len(text) - place if place >= 0 else 0
