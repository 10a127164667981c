"""A conversation, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from eventlm.errors import UsageError

JSON_ENDING, MARKDOWN_ENDING = ".json", ".md"


class Message(Struct):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(Struct):
    """Turns of user and assistant, one after the other, under a system message (empty: none)."""

    system: str = ""
    turns: list[Message] = []

    def messages(self) -> list[dict[str, str]]:
        """The conversation as a request carries it."""
        system = [Message("system", self.system)] if self.system else []
        return [{"role": message.role, "content": message.content} for message in [*system, *self.turns]]

    def undo(self) -> str | None:
        """Take the last question and its answer back; the question, None if there is none."""
        while self.turns:
            if (message := self.turns.pop()).role == "user":
                return message.content
        return None


class SavedChat(Struct):
    """A chat in a file: the body of a request to /v1/chat/completions without its sampling parameters, and those."""

    conversation: Conversation
    parameters: dict[str, Any]


def save(path: Path, model: str, chat: SavedChat) -> None:
    """Write a chat as JSON, which `load` reads and a server takes as a request's body, or as Markdown to be read.

    Raises UsageError for another ending and where the file cannot be written.
    """
    messages = chat.conversation.messages()
    if path.suffix == JSON_ENDING:
        body = {"model": model, **chat.parameters, "messages": messages}
        data = msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"
    elif path.suffix == MARKDOWN_ENDING:
        parts = [f"# Chat with {model}", *(f"## {message['role']}\n\n{message['content']}" for message in messages)]
        data = ("\n\n".join(parts) + "\n").encode()
    else:
        raise UsageError(f"{path}: the name must end in {JSON_ENDING} or {MARKDOWN_ENDING}")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path) -> SavedChat:
    """Read a chat from JSON: the body of a request, or its list of messages alone. Raises UsageError."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "; Markdown is for reading only" if path.suffix == MARKDOWN_ENDING else ""
        raise UsageError(f"{path} is not JSON ({error}){hint}") from error
    body = {"messages": value} if isinstance(value, list) else value
    if not isinstance(body, dict) or "messages" not in body:
        raise UsageError(f"{path} holds no chat: an object with `messages`, or a list of messages, is expected")
    try:
        messages = msgspec.convert(body.pop("messages"), list[Message])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: messages: {error}") from error
    body.pop("model", None)
    return SavedChat(_conversation(path, messages), body)


def _conversation(path: Path, messages: list[Message]) -> Conversation:
    system = messages[0].content if messages and messages[0].role == "system" else ""
    turns = messages[1:] if system else messages
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message.role != expected:
            index = number + (len(messages) - len(turns))
            raise UsageError(f"{path}: messages[{index}] is of the {message.role}, the {expected}'s is expected")
    if len(turns) % 2:
        raise UsageError(f"{path}: the last message is the user's and has no answer")
    return Conversation(system, turns)
