"""The items of an input."""

from __future__ import annotations

from hashlib import blake2b

from msgspec import structs

from eventlm.server.responses.protocol import InputItem, Part

#: How the ids of items begin.
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def item_id(type_: str, reply_id: str, place: str) -> str:
    """The id of an item at a place of a response, the same whenever it is made again."""
    return f"{ID_PREFIXES[type_]}_{blake2b(f'{reply_id}/{place}'.encode(), digest_size=16).hexdigest()}"


def input_items(input: str | list[InputItem] | None) -> list[InputItem]:
    """The items of an input in either form."""
    if isinstance(input, str):
        return [InputItem(type="message", role="user", content=[Part(type="input_text", text=input)])]
    return [] if input is None else input


def shown_input(input: str | list[InputItem] | None, reply_id: str) -> list[InputItem]:
    """A checked input as it is shown and kept: every item with an id, every content as parts; without references."""
    return [_shown(item, reply_id, index) for index, item in enumerate(input_items(input)) if not is_reference(item)]


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
        shown.content = [Part(type=kind, text=item.content, annotations=[] if is_output else None)]
    return shown
