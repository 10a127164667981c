"""The items of an input: their types, their ids, and the messages of a chat that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from msgspec import structs

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.server.responses.protocol import InputItem, InputPart
from eventlm.text.protocol import CalledFunction, ChatMessage, ContentPart, MessageToolCall

#: How the ids of items begin.
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def item_id(type_: str, reply_id: str, place: str) -> str:
    """The id of an item at a place of a response, the same whenever it is made again."""
    return f"{ID_PREFIXES[type_]}_{blake2b(f'{reply_id}/{place}'.encode(), digest_size=16).hexdigest()}"


def input_items(input: str | list[InputItem] | None) -> list[InputItem]:
    """The items of an input in either form."""
    if isinstance(input, str):
        return [InputItem(type="message", role="user", content=[InputPart(type="input_text", text=input)])]
    return [] if input is None else input


def shown_input(input: str | list[InputItem] | None, reply_id: str) -> list[InputItem]:
    """A checked input as it is shown and kept: every item with a type and an id, every content as parts."""
    return [_shown(item, reply_id, index) for index, item in enumerate(input_items(input))]


def item_type(item: InputItem) -> str:
    """The type of an item, which those of two types need not have."""
    return item.type or ("message" if item.role is not None or item.id is None else "item_reference")


def is_reference(item: InputItem) -> bool:
    """Whether an item stands for an earlier one."""
    return item_type(item) == "item_reference"


def _shown(item: InputItem, reply_id: str, index: int) -> InputItem:
    type_ = item_type(item)
    shown = structs.replace(
        item,
        type=type_,
        id=item.id or item_id(type_, reply_id, f"input/{index}"),
        status=item.status or "completed",
    )
    if isinstance(item.content, str):
        is_output = item.role == "assistant"
        kind = "output_text" if is_output else "input_text"
        shown.content = [InputPart(type=kind, text=item.content, annotations=[] if is_output else None)]
    return shown


class ItemMessages:
    """The messages of a chat, from items without references.

    What the model wrote without a pause is one message: reasoning, a text, calls. messages, params: each message, and
    the path of the item that began it. Raises InputError.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.params: list[str] = []

    def add_all(self, items: Sequence[InputItem], param: str) -> None:
        """Add items, whose path is `param`."""
        for index, item in enumerate(items):
            self.add(item, f"{param}[{index}]")

    def add(self, item: InputItem, param: str) -> None:
        """Add an item."""
        match item_type(item):
            case "message":
                self._add_message(item, param)
            case "function_call":
                self._add_call(item, param)
            case "function_call_output":
                self._add_output(item, param)
            case "reasoning":
                self._add_reasoning(item, param)
            case other:
                raise InputError(
                    f"{param}.type",
                    f"Invalid value for '{param}.type': '{other}' items are not supported; this server knows "
                    f"{', '.join(map(repr, (*ID_PREFIXES, 'item_reference')))}, and other tools run at the client.",
                )

    def _add_message(self, item: InputItem, param: str) -> None:
        if item.role not in _ROLES:
            if item.role is None:
                raise MissingParameterError(f"{param}.role")
            known = ", ".join(map(repr, _ROLES))
            raise InputError(f"{param}.role", f"Invalid value for '{param}.role': supported values are {known}.")
        if item.content is None:
            raise MissingParameterError(f"{param}.content")
        content = _content(item.content, f"{param}.content")
        if item.role != "assistant":
            self._append(ChatMessage(role=item.role, content=content), param)
            return
        message = self._answer(param, goes_on=lambda last: last.content is None and not last.tool_calls)
        message.content = content

    def _add_call(self, item: InputItem, param: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise MissingParameterError(f"{param}.{name}")
        assert item.call_id is not None
        assert item.name is not None
        assert item.arguments is not None
        call = MessageToolCall(id=item.call_id, function=CalledFunction(item.name, item.arguments))
        message = self._answer(param, goes_on=lambda last: True)
        if message.tool_calls is None:
            message.tool_calls = []
        message.tool_calls.append(call)

    def _add_output(self, item: InputItem, param: str) -> None:
        for name in ("call_id", "output"):
            if getattr(item, name) is None:
                raise MissingParameterError(f"{param}.{name}")
        assert item.output is not None
        content = _content(item.output, f"{param}.output")
        self._append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id, name=item.name), param)

    def _add_reasoning(self, item: InputItem, param: str) -> None:
        if isinstance(item.content, str):
            raise InvalidTypeError(
                f"{param}.content", f"Invalid type for '{param}.content': expected a list of parts, got a string."
            )
        text = "\n".join(part.text or "" for part in item.content or item.summary or ())
        # That of another server, which only it can read, is left out.
        if text:
            self._answer(param, goes_on=lambda last: False).reasoning_content = text

    def _answer(self, param: str, goes_on: Callable[[ChatMessage], bool]) -> ChatMessage:
        """The message by the model that an item is part of: the last one if that goes on, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or not goes_on(last):
            last = ChatMessage(role="assistant")
            self._append(last, param)
        return last

    def _append(self, message: ChatMessage, param: str) -> None:
        self.messages.append(message)
        self.params.append(param)


def _content(content: str | list[InputPart], param: str) -> str | list[ContentPart]:
    """The content of a chat's message. Raises InputError for anything but text."""
    if isinstance(content, str):
        return content
    return [_part(part, f"{param}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, param: str) -> ContentPart:
    if part.type not in _TEXT_PARTS:
        raise InputError(
            f"{param}.type",
            f"Invalid value for '{param}.type': models here take text only, as 'input_text', 'output_text' or "
            f"'refusal', got '{part.type}'.",
        )
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if name == "refusal" else part.text
    if text is None:
        raise MissingParameterError(f"{param}.{name}")
    return ContentPart("text", text)
