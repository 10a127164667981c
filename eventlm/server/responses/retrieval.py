"""`/v1/responses/{id}`: responses that are kept."""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Raw, Struct, structs

from eventlm.engine.object_store.actions import StoredObject, UnknownObjectError
from eventlm.engine.request import UnknownReplyError
from eventlm.errors import InputError
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response, read_query
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import ApiError
from eventlm.server.reply_format import SERVER_SENT_EVENTS
from eventlm.server.responses.background import KEPT_SECONDS, stream_response
from eventlm.server.responses.events import ResponseEvent
from eventlm.server.responses.paging import (
    INCLUDE,
    PAGE_PARAMETERS,
    ItemList,
    PageQuery,
    item_list,
    no_item_to_follow,
)
from eventlm.server.responses.replies import Response
from eventlm.server.responses.stored import RESPONSE, StoredResponse, present_reply

EventNumber = Annotated[int, Meta(ge=0, le=2**53)]


class RetrieveQuery(Struct, frozen=True, kw_only=True):
    """How a response is wanted."""

    stream: bool = False
    starting_after: EventNumber | None = None


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """Reply of `DELETE /v1/responses/{id}`."""

    id: str
    object: str = "response"
    deleted: bool = True


async def retrieve_response(request: web.Request) -> web.StreamResponse:
    """A response that is kept.

    With `stream`, the events of one that was created with `background`, from its first or the one after
    `starting_after`. That counts as a request against the key's limits, and ends any other stream of the response.
    """
    query = read_query(request, RetrieveQuery)
    found = await _find(request)
    if query.starting_after is not None and not query.stream:
        raise InputError("starting_after", "'starting_after' is for streams: give 'stream=true' too.")
    # A HEAD would take the stream from its reader and discard it.
    if not query.stream or request.method == "HEAD":
        return json_response(await _present(request, found))
    if not StoredResponse.decode(found.data).head.background:
        raise InputError(
            "stream", "Only responses that were created with 'background' can be streamed again; leave 'stream' out."
        )
    after = -1 if query.starting_after is None else query.starting_after
    return await stream_response(request, request.match_info["id"], after=after)


async def delete_response(request: web.Request) -> web.Response:
    """Delete a response. One that is being generated in the background ends."""
    context, id, owner = request.app[CONTEXT], request.match_info["id"], request[PRINCIPAL].owner
    if not await context.engine.objects.delete(RESPONSE, id, owner):
        raise response_not_found(id)
    with contextlib.suppress(UnknownReplyError):
        await context.engine.cancel_reply(id, owner)
    return json_response(DeletedResponse(id=id))


async def cancel_response(request: web.Request) -> web.Response:
    """End a response that is being generated in the background. One that is over stays as it is."""
    context, id, owner = request.app[CONTEXT], request.match_info["id"], request[PRINCIPAL].owner
    found = await _find(request)
    head = StoredResponse.decode(found.data).head
    if not head.background:
        raise ApiError(400, "Only responses that were created with 'background' can be cancelled.")
    if head.goes_on and found.is_held:
        with contextlib.suppress(UnknownReplyError):
            await context.engine.cancel_reply(id, owner)
        found = await _find(request, wait_seconds=KEPT_SECONDS)
    return json_response(await _present(request, found))


async def list_input_items(request: web.Request) -> web.Response:
    """The items that a response was generated from, those of earlier responses included."""
    query = read_query(request, PageQuery)
    items = StoredResponse.decode((await _find(request)).data).input
    if query.order == "desc":
        items = items[::-1]
    start = 0
    if query.after:
        start = next((index for index, item in enumerate(items, start=1) if item.id == query.after), 0)
        if not start:
            raise no_item_to_follow(query.after)
    page = items[start : start + query.limit]
    data = [(item.id or "", Raw(msgspec.json.encode(item))) for item in page]
    return json_response(item_list(data, has_more=start + len(page) < len(items)))


def response_not_found(id: str) -> ApiError:
    """404: no such response, no longer kept, or another owner's."""
    return ApiError(404, f"Response with id '{id}' not found.")


async def _find(request: web.Request, *, wait_seconds: float = 0) -> StoredObject:
    id, objects = request.match_info["id"], request.app[CONTEXT].engine.objects
    try:
        return await objects.get(RESPONSE, id, request[PRINCIPAL].owner, wait_seconds=wait_seconds)
    except UnknownObjectError as error:
        raise response_not_found(id) from error


async def _present(request: web.Request, found: StoredObject) -> object:
    """A response as it is now. The engine knows whether one that goes on still waits."""
    if not found.is_held:
        return present_reply(found, None)
    status = None
    with contextlib.suppress(UnknownReplyError):
        status = await request.app[CONTEXT].engine.status(request.match_info["id"], request[PRINCIPAL].owner)
    if status is None or all(sample.state == "finished" for sample in status.samples):
        # Nothing more comes, and it is being kept as it ended unless the store fails.
        found = structs.replace(await _find(request, wait_seconds=KEPT_SECONDS), is_held=False)
    return present_reply(found, status)


_PATH = "/v1/responses/{id:[^/]+}"
RETRIEVAL_ENDPOINTS = (
    Endpoint(
        "GET",
        _PATH,
        retrieve_response,
        reply=Response,
        chunk=ResponseEvent,
        chunk_type=SERVER_SENT_EVENTS,
        parameters=(
            Parameter("stream", "query", bool, "Whether its events are wanted."),
            Parameter("starting_after", "query", EventNumber, "The sequence_number of the last event received."),
            INCLUDE,
        ),
        errors=(409, 429, 503),
    ),
    Endpoint("DELETE", _PATH, delete_response, reply=DeletedResponse, errors=(503,)),
    Endpoint("POST", f"{_PATH}/cancel", cancel_response, reply=Response, errors=(503,)),
    Endpoint(
        "GET",
        f"{_PATH}/input_items",
        list_input_items,
        reply=ItemList,
        parameters=PAGE_PARAMETERS,
        errors=(503,),
    ),
)
