"""`/v1/batches`: create, look at, list and cancel batches. `BatchWorker` runs them."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct, structs

from eventlm.errors import InputError
from eventlm.server.api import APIS
from eventlm.server.batches.files import SECONDS_PER_DAY, on_disk, owner_folder
from eventlm.server.batches.folder import BATCHES, BatchRecord, OwnerFolder, page
from eventlm.server.batches.objects import TERMINAL, BatchList, BatchObject, CreateBatchRequest
from eventlm.server.batches.worker import apis_by_path
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body, read_query
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import ApiError
from eventlm.text.decoding import decode_request

#: OpenAI's one and only completion window.
WINDOW_SECONDS = SECONDS_PER_DAY
MAX_PAGE = 100


class _Query(Struct, kw_only=True):
    """The query of a list of batches."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20


async def create_batch(request: web.Request) -> web.Response:
    """Run the requests in an uploaded file, at the lowest priority."""
    context, folder = request.app[CONTEXT], owner_folder(request)
    body = decode_request(await read_body(request), CreateBatchRequest, {})
    known = sorted(apis_by_path(request.app[APIS]))
    if body.endpoint not in known:
        expected = ", ".join(f"'{path}'" for path in known)
        raise InputError("endpoint", f"Invalid value for 'endpoint': supported values are {expected}.")
    record = await on_disk(_create, context, folder, body)
    request.app[BATCHES].changed.set()
    return json_response(folder.seen(record))


def _create(context: ServerContext, folder: OwnerFolder, body: CreateBatchRequest) -> BatchRecord:
    try:
        purpose = folder.file(body.input_file_id).file.purpose
    except ApiError as error:
        raise ApiError(404, str(error), param="input_file_id") from error
    if purpose != "batch":
        raise InputError(
            "input_file_id", "Invalid value for 'input_file_id': the file must have been uploaded with purpose 'batch'."
        )
    most = context.config.batch_max_objects
    records = folder.batches()
    over = [record for record in records if record.batch.status in TERMINAL]
    if len(records) - len(over) >= most:
        message = f"This key has {most} batches that are not over, the most it may have: wait for one, or cancel one."
        raise ApiError(429, message, type="requests", code="too_many_batches", should_retry=False)
    for oldest in over[: max(len(records) - most + 1, 0)]:
        folder.remove_batch(oldest.batch.id)
    now_ns = context.system.clock.unix_ns()
    created_at = now_ns // 1_000_000_000
    expiry = body.output_expires_after
    record = BatchRecord(
        created_ns=now_ns,
        output_file_id=folder.new_file_id(),
        error_file_id=folder.new_file_id(),
        output_seconds=expiry.seconds if expiry else context.config.batch_keep_days * SECONDS_PER_DAY,
        batch=BatchObject(
            id=folder.new_batch_id(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            status="validating",
            created_at=created_at,
            expires_at=created_at + WINDOW_SECONDS,
            metadata=body.metadata,
        ),
    )
    folder.save(record)
    return record


async def list_batches(request: web.Request) -> web.Response:
    """The batches of the key, the newest first."""
    folder, query = owner_folder(request), read_query(request, _Query)

    def find() -> BatchList:
        records = folder.batches()[::-1]
        found, has_more = page(records, [record.batch.id for record in records], query.after, query.limit)
        data = [folder.seen(record) for record in found]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data=data, first_id=first, last_id=last, has_more=has_more)

    return json_response(await on_disk(find))


async def get_batch(request: web.Request) -> web.Response:
    """A batch: its status, counts and files."""
    folder, batch_id = owner_folder(request), request.match_info["id"]
    return json_response(await on_disk(lambda: folder.seen(folder.batch(batch_id))))


async def cancel_batch(request: web.Request) -> web.Response:
    """End a batch. What it has made so far can be downloaded once its status is `cancelled`."""
    folder, batch_id = owner_folder(request), request.match_info["id"]

    def cancel() -> BatchObject:
        batch = folder.batch(batch_id).batch
        if batch.status in TERMINAL:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise ApiError(409, message, param="id", code="batch_is_over", should_retry=False)
        folder.ask_to_cancel(batch_id)
        # Others learn of it by the mark.
        now = request.app[CONTEXT].system.clock.unix_s()
        return structs.replace(folder.seen(folder.batch(batch_id)), status="cancelling", cancelling_at=now)

    batch = await on_disk(cancel)
    request.app[BATCHES].changed.set()
    return json_response(batch)


BATCH_ENDPOINTS = (
    Endpoint("POST", "/v1/batches", create_batch, CreateBatchRequest, BatchObject, errors=(429, 507)),
    Endpoint(
        "GET",
        "/v1/batches",
        list_batches,
        reply=BatchList,
        errors=(404,),
        parameters=(
            Parameter("after", "query", str, "the id of the last object of the page before"),
            Parameter("limit", "query", int, f"1 to {MAX_PAGE}"),
        ),
    ),
    Endpoint("GET", "/v1/batches/{id}", get_batch, reply=BatchObject),
    Endpoint("POST", "/v1/batches/{id}/cancel", cancel_batch, reply=BatchObject, errors=(409, 507)),
)
