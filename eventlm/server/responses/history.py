"""What comes before a request's own input: an earlier response, or a conversation."""

from __future__ import annotations

import msgspec

from eventlm.engine.object_store.actions import ObjectHeldError, ObjectTooLargeError, UnknownObjectError
from eventlm.errors import InputError, MissingParameterError
from eventlm.server.api import Caller
from eventlm.server.context import ServerContext
from eventlm.server.errors import ApiError
from eventlm.server.responses.items import is_reference
from eventlm.server.responses.protocol import InputFields, InputItem
from eventlm.server.responses.stored import CONVERSATION, RESPONSE, StoredResponse

#: Items of a conversation that are read at once.
_PAGE_ITEMS = 1000
_decode_item = msgspec.json.Decoder(InputItem).decode


async def earlier_items(context: ServerContext, body: InputFields, caller: Caller) -> list[InputItem]:
    """The items before the body's own: those of `previous_response_id`, or of `conversation`.

    Raises InputError or ApiError.
    """
    owner = caller.principal.owner
    if body.previous_response_id is not None and body.conversation_id is not None:
        raise InputError(
            "previous_response_id",
            "'previous_response_id' and 'conversation' cannot be used together: give one of them.",
        )
    if body.previous_response_id is not None:
        return await _items_of_response(context, body.previous_response_id, owner)
    if body.conversation_id is not None:
        return await _items_of_conversation(context, body.conversation_id, owner)
    return []


async def resolved(context: ServerContext, items: list[InputItem], owner: str, param: str) -> list[InputItem]:
    """Items, which a body has at `param`, with what references among them stand for. Raises InputError."""
    for index, item in enumerate(items):
        if is_reference(item) and not item.id:
            raise MissingParameterError(f"{param}[{index}].id")
    found: dict[str, InputItem] = {}
    all_items = []
    for index, item in enumerate(items):
        if not is_reference(item):
            all_items.append(item)
            continue
        assert item.id is not None
        if item.id not in found:
            try:
                found[item.id] = _decode_item(await context.engine.objects.find_item(owner, item.id))
            except UnknownObjectError as error:
                raise InputError(
                    f"{param}[{index}].id",
                    f"Invalid value for '{param}[{index}].id': no item has the id '{item.id}'; send the item itself.",
                ) from error
        all_items.append(found[item.id])
    return all_items


async def hold_conversation(context: ServerContext, id: str, owner: str) -> None:
    """Let no other response be appended to a conversation. Raises ApiError."""
    try:
        await context.engine.objects.change(CONVERSATION, id, owner, hold=True)
    except UnknownObjectError as error:
        raise conversation_not_found(id) from error
    except ObjectHeldError as error:
        raise ApiError(
            400,
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
            param="conversation",
            code="conversation_locked",
        ) from error


def conversation_not_found(id: str) -> ApiError:
    """404: no such conversation, no longer kept, or another owner's."""
    return ApiError(404, f"Conversation with id '{id}' not found.")


def duplicate_item(id: str) -> ApiError:
    """400: items with the same id."""
    message = f"Duplicate item found with id {id}. Remove duplicate items from your input and try again."
    return ApiError(400, message, param="input")


def too_large_to_keep(error: ObjectTooLargeError) -> ApiError:
    """400: a response or a conversation that is over a bound of the store."""
    return ApiError(400, f"This is too large to be kept: {error}. Send fewer items, or 'store': false.", param="input")


async def _items_of_response(context: ServerContext, id: str, owner: str) -> list[InputItem]:
    param = "previous_response_id"
    try:
        found = await context.engine.objects.get(RESPONSE, id, owner)
    except UnknownObjectError as error:
        message = f"Previous response with id '{id}' not found."
        raise ApiError(400, message, param=param, code="previous_response_not_found") from error
    stored = StoredResponse.decode(found.data)
    if found.is_held and stored.head.goes_on:
        raise InputError(param, f"The response '{id}' has not ended; wait until its status is 'completed'.")
    return stored.all_items


async def _items_of_conversation(context: ServerContext, id: str, owner: str) -> list[InputItem]:
    items: list[InputItem] = []
    after, num_bytes = "", 0
    while True:
        try:
            page = await context.engine.objects.list_items(CONVERSATION, id, owner, after=after, limit=_PAGE_ITEMS)
        except UnknownObjectError as error:
            raise conversation_not_found(id) from error
        items += [_decode_item(item.data) for item in page.items]
        num_bytes += sum(len(item.data) for item in page.items)
        if num_bytes > context.config.max_body_bytes:
            raise InputError(
                "conversation",
                f"The conversation '{id}' has more than the {context.config.max_body_bytes:,} bytes that a request may "
                "have; delete items, or begin another one.",
            )
        if not page.has_more:
            return items
        after = page.items[-1].id
