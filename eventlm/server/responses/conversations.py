"""`/v1/conversations`: lists of items that responses go on with."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Raw, Struct, structs

from eventlm.engine.object_store.actions import (
    DuplicateItemError,
    ObjectTooLargeError,
    StoredItem,
    UnknownObjectError,
)
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response, read_body, read_query
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.errors import ApiError
from eventlm.server.responses.history import conversation_not_found, duplicate_item, resolved, too_large_to_keep
from eventlm.server.responses.items import ItemMessages, shown_input
from eventlm.server.responses.paging import (
    INCLUDE,
    PAGE_PARAMETERS,
    ItemList,
    PageQuery,
    item_list,
    no_item_to_follow,
)
from eventlm.server.responses.protocol import InputItem
from eventlm.server.responses.stored import (
    CONVERSATION,
    CONVERSATION_PREFIX,
    StoredConversation,
    stored_items,
)
from eventlm.text.decoding import decode_request
from eventlm.text.protocol import MetadataKey, MetadataValue

T = TypeVar("T")
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Items = Annotated[list[InputItem], Meta(max_length=20)]
_encode = msgspec.json.Encoder().encode


class CreateConversation(Struct, kw_only=True):
    """Body of `POST /v1/conversations`."""

    items: Items | None = None
    metadata: Metadata | None = None


class UpdateConversation(Struct, kw_only=True):
    """Body of `POST /v1/conversations/{id}`: replaces the metadata."""

    metadata: Metadata | None


class CreateItems(Struct, kw_only=True):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: Items


class DeletedConversation(Struct, frozen=True, kw_only=True):
    """Reply of `DELETE /v1/conversations/{id}`."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


async def create_conversation(request: web.Request) -> web.Response:
    """Begin a conversation, maybe with items."""
    context = request.app[CONTEXT]
    body = decode_request(await read_body(request), CreateConversation, {})
    created = StoredConversation(
        id=context.system.chance.identity(CONVERSATION_PREFIX),
        created_at=context.system.clock.unix_s(),
        metadata=body.metadata or {},
    )
    items = await _items(request, body.items or [])
    await _kept(
        created.id,
        context.engine.objects.put(CONVERSATION, created.id, request[PRINCIPAL].owner, _encode(created), items),
    )
    return json_response(created)


async def retrieve_conversation(request: web.Request) -> web.Response:
    """A conversation, without its items."""
    return json_response(await _find(request))


async def update_conversation(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    body = decode_request(await read_body(request), UpdateConversation, {})
    changed = structs.replace(await _find(request), metadata=body.metadata or {})
    objects, owner = request.app[CONTEXT].engine.objects, request[PRINCIPAL].owner
    await _kept(changed.id, objects.change(CONVERSATION, changed.id, owner, _encode(changed)))
    return json_response(changed)


async def delete_conversation(request: web.Request) -> web.Response:
    """Delete a conversation and its items."""
    id = request.match_info["id"]
    if not await request.app[CONTEXT].engine.objects.delete(CONVERSATION, id, request[PRINCIPAL].owner):
        raise conversation_not_found(id)
    return json_response(DeletedConversation(id=id))


async def create_items(request: web.Request) -> web.Response:
    """Append items to a conversation."""
    body = decode_request(await read_body(request), CreateItems, {})
    id, objects = request.match_info["id"], request.app[CONTEXT].engine.objects
    items = await _items(request, body.items)
    await _kept(id, objects.change(CONVERSATION, id, request[PRINCIPAL].owner, items=items))
    return json_response(_page(items, has_more=False))


async def list_items(request: web.Request) -> web.Response:
    """The items of a conversation."""
    query = read_query(request, PageQuery)
    conversation = await _find(request)
    try:
        page = await request.app[CONTEXT].engine.objects.list_items(
            CONVERSATION,
            conversation.id,
            request[PRINCIPAL].owner,
            after=query.after,
            limit=query.limit,
            is_descending=query.order == "desc",
        )
    except UnknownObjectError as error:
        raise no_item_to_follow(query.after) from error
    return json_response(_page(page.items, has_more=page.has_more))


async def retrieve_item(request: web.Request) -> web.Response:
    """An item of a conversation."""
    id, item_id = request.match_info["id"], request.match_info["item"]
    objects, owner = request.app[CONTEXT].engine.objects, request[PRINCIPAL].owner
    try:
        return json_response(Raw(await objects.get_item(CONVERSATION, id, owner, item_id)))
    except UnknownObjectError as error:
        raise _item_not_found(item_id, id) from error


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item of a conversation. Returns the conversation."""
    conversation, item_id = await _find(request), request.match_info["item"]
    objects, owner = request.app[CONTEXT].engine.objects, request[PRINCIPAL].owner
    if not await _kept(conversation.id, objects.delete_item(CONVERSATION, conversation.id, owner, item_id)):
        raise _item_not_found(item_id, conversation.id)
    return json_response(conversation)


async def _items(request: web.Request, items: list[InputItem]) -> list[StoredItem]:
    """Items of a body as they are kept. Raises InputError for those that no model here could be given."""
    items = await resolved(request.app[CONTEXT], items, request[PRINCIPAL].owner, "items")
    ItemMessages().add_all(items, "items")
    # Their place says nothing: items are appended at different times.
    return stored_items(shown_input(items, request.app[CONTEXT].system.chance.identity("")))


def _page(items: list[StoredItem], *, has_more: bool) -> ItemList:
    return item_list([(item.id, Raw(item.data)) for item in items], has_more=has_more)


def _item_not_found(item_id: str, conversation: str) -> ApiError:
    return ApiError(404, f"Item with id '{item_id}' not found in conversation '{conversation}'.")


async def _find(request: web.Request) -> StoredConversation:
    """Raises ApiError (404)."""
    id, objects = request.match_info["id"], request.app[CONTEXT].engine.objects
    found = await _kept(id, objects.get(CONVERSATION, id, request[PRINCIPAL].owner))
    return msgspec.json.decode(found.data, type=StoredConversation)


async def _kept(id: str, call: Awaitable[T]) -> T:
    """Await a call on a conversation. Raises ApiError for what the client has to change."""
    try:
        return await call
    except UnknownObjectError as error:
        raise conversation_not_found(id) from error
    except DuplicateItemError as error:
        raise duplicate_item(str(error)) from error
    except ObjectTooLargeError as error:
        raise too_large_to_keep(error) from error


_ROOT = "/v1/conversations"
_PATH = f"{_ROOT}/{{id:[^/]+}}"
_ITEM = f"{_PATH}/items/{{item:[^/]+}}"
CONVERSATION_ENDPOINTS = (
    Endpoint("POST", _ROOT, create_conversation, CreateConversation, StoredConversation),
    Endpoint("GET", _PATH, retrieve_conversation, reply=StoredConversation, errors=(503,)),
    Endpoint("POST", _PATH, update_conversation, UpdateConversation, StoredConversation),
    Endpoint("DELETE", _PATH, delete_conversation, reply=DeletedConversation, errors=(503,)),
    Endpoint("POST", f"{_PATH}/items", create_items, CreateItems, ItemList, parameters=(INCLUDE,)),
    Endpoint("GET", f"{_PATH}/items", list_items, reply=ItemList, parameters=PAGE_PARAMETERS, errors=(503,)),
    Endpoint("GET", _ITEM, retrieve_item, reply=InputItem, parameters=(INCLUDE,), errors=(503,)),
    Endpoint("DELETE", _ITEM, delete_item, reply=StoredConversation, errors=(503,)),
)
