"""What the dashboard reads. Each needs a key with the scope `admin`; none changes anything."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from eventlm.engine.oldest_requests import MAX_LISTED, OldestRequests
from eventlm.engine.reports import NoReportError
from eventlm.errors import EventLMError
from eventlm.formatting import sentence
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response, read_query
from eventlm.server.dashboard.feed import FrameFeed, LiveFrame
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import ApiError, api_error
from eventlm.server.http.event_stream import EventStream
from eventlm.server.middleware import LOOK_LIVE_PATH, LOOK_REQUESTS_PATH, STREAM_ERROR
from eventlm.server.reply_format import SERVER_SENT_EVENTS

FEED = web.AppKey("feed", FrameFeed)
#: Of a stream of frames: less than two of them, because older ones are of no use to a client that reads slowly.
MAX_WAITING_BYTES = 2048
#: Seconds after which to ask for a report again while another one is being made.
_RETRY_SECONDS = 10
Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED)]
Minutes = Annotated[int, Meta(ge=1, le=1440)]


class OldestQuery(Struct, frozen=True, kw_only=True):
    """Query of `GET /admin/look/requests`."""

    limit: Limit = 20


class ReportQuery(Struct, frozen=True, kw_only=True):
    """Query of `GET /admin/look/report`."""

    minutes: Minutes = 5


async def live(request: web.Request) -> web.StreamResponse:
    """A stream with a frame each second: what the engine did in that second, and how it stands.

    Times are in nanoseconds. The first frame comes at once, without rates. A client that reads slowly misses frames.
    """
    context = request.app[CONTEXT]
    stream = EventStream(request, context.config, SERVER_SENT_EVENTS, max_waiting_bytes=MAX_WAITING_BYTES)
    tail = b""
    with request.app[FEED].watch() as watcher:
        # Before the stream has begun an error still has a status.
        event = await watcher.next()
        await stream.start()
        try:
            while event is not None and _may_look(request):
                await stream.write(event)
                event = await watcher.next()
        except EventLMError as failure:
            error = stream.response[STREAM_ERROR] = api_error(failure)
            tail = b"event: error\ndata: %b\n\n" % error.to_json()
    await stream.end(tail)
    return stream.response


def _may_look(request: web.Request) -> bool:
    """Whether the key still has the scope: a stream may outlive that."""
    holder = request.app[CONTEXT].keys.holder(request[PRINCIPAL].owner)
    return holder is not None and "admin" in holder.scopes


async def oldest(request: web.Request) -> web.Response:
    """The oldest requests that wait and that run, why those wait that are in no step, and the replicas."""
    query = read_query(request, OldestQuery)
    return json_response(await request.app[CONTEXT].engine.list_oldest(query.limit))


async def report(request: web.Request) -> web.Response:
    """A report of the last minutes as one page, which is a file to keep.

    It is made from the trace by a process of its own, one at a time: a 429 while another one is being made.
    """
    query = read_query(request, ReportQuery)
    try:
        page = await request.app[CONTEXT].engine.report(60 * query.minutes)
    except NoReportError as error:
        raise _no_report(error) from error
    headers = {
        "Cache-Control": "no-store",
        "Content-Disposition": 'attachment; filename="eventlm-report.html"',
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)


def _no_report(error: NoReportError) -> ApiError:
    message = sentence(str(error))
    match error.reason:
        case "busy":
            return ApiError(429, message, type="requests", code="rate_limit_exceeded", retry_after=_RETRY_SECONDS)
        case "too_long":
            return ApiError(
                503, message, type="server_error", code="report_too_long", retry_after=60, should_retry=False
            )
        case "not_recorded":
            return ApiError(409, message, code=error.reason, should_retry=False)
        case "failed":
            return ApiError(500, message, type="server_error", code="report_failed", should_retry=False)


LOOK_ENDPOINTS = (
    Endpoint(
        "GET",
        LOOK_LIVE_PATH,
        live,
        media_types=(SERVER_SENT_EVENTS,),
        chunk=LiveFrame,
        errors=(503,),
        scope="admin",
    ),
    Endpoint(
        "GET",
        LOOK_REQUESTS_PATH,
        oldest,
        reply=OldestRequests,
        parameters=(Parameter("limit", "query", Limit, "How many of each kind at most."),),
        errors=(503,),
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/admin/look/report",
        report,
        media_types=("text/html",),
        parameters=(Parameter("minutes", "query", Minutes, "How far back it goes."),),
        errors=(409, 429, 503),
        scope="admin",
    ),
)
