"""For every request: an id, a line in the log, the error envelope, the check of its key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web
from aiohttp.hdrs import METH_ALL

from eventlm.errors import EventLMError, InputError
from eventlm.server.auth.api_keys import ANYBODY, PRINCIPAL, ApiKeys, Principal, Scope
from eventlm.server.context import CONTEXT, release_body
from eventlm.server.errors import (
    CANCELLED,
    ERROR_FORMS,
    ApiError,
    api_error,
    error_form,
    from_http_exception,
    internal_error,
    rate_limit_headers,
)
from eventlm.server.http.connection import REQUEST_ID_HEADER, SANE_REQUEST_ID, SERVER_NAME, request_id
from eventlm.server.refusals import REFUSED_PATHS, why_refused
from eventlm.server.request_log import error_fields, generation_fields, request_fields
from eventlm.text.generation import Generation

_log = structlog.get_logger("eventlm.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The request's id, also in every line that is logged while it is handled.
REQUEST_ID = web.RequestKey("request_id", str)
#: The generation of a request, once it is submitted.
GENERATION = web.RequestKey("generation", Generation)
#: The model that answers a request, if it is not the one that was asked for.
ANSWERED_BY = web.RequestKey("answered_by", str)
ANSWERED_BY_HEADER = "x-eventlm-model"
API_KEY_HEADER = "x-api-key"
#: Sent with every 401.
ASK_FOR_KEY = {"WWW-Authenticate": "Bearer"}
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
#: SageMaker's name for the first.
PING_PATH = "/ping"
LOAD_PATH = "/load"
#: What the dashboard asks for again and again, and its stream, which lasts for as long as somebody looks.
LOOK_REQUESTS_PATH = "/admin/look/requests"
LOOK_LIVE_PATH = "/admin/look/live"
#: Paths that monitors poll. They are logged at the level debug.
_POLLED = (HEALTH_PATH, METRICS_PATH, PING_PATH, LOAD_PATH, LOOK_REQUESTS_PATH)
_NOT_COUNTED = (*_POLLED, "/version", LOOK_LIVE_PATH)
#: Files of pages, of which a browser asks for many at a time. They are logged at that level too.
CHAT_PAGE_FOLDER = "/ui/"
DASHBOARD_PATH, DASHBOARD_FOLDER = "/dashboard", "/dashboard/"
#: The scope that a key needs, by handler; None: no key is needed.
SCOPES = web.AppKey("scopes", dict[Handler, Scope | None])
#: The error that ended a stream after its status was sent.
STREAM_ERROR = web.ResponseKey("stream_error", ApiError)


def take_request_id(request: web.Request, named: str | None) -> None:
    """Use `request_id` of a body, unless the header has a valid one. Raises InputError for an invalid one."""
    if named is None:
        return
    if not SANE_REQUEST_ID.fullmatch(named):
        raise InputError(
            "request_id",
            "Invalid value for 'request_id': it has 1 to 128 letters, digits and characters of '._:/+=@-'.",
        )
    if not SANE_REQUEST_ID.fullmatch(request.headers.get(REQUEST_ID_HEADER, "")):
        request[REQUEST_ID] = named
        structlog.contextvars.bind_contextvars(request_id=named)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: add the request's id, the state of its key's limits and, if it is not the one asked
    for, the model that answers.
    """
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    response.headers["Server"] = SERVER_NAME
    generation = request.get(GENERATION)
    if generation is not None and generation.handles[0].rate_limits is not None:
        response.headers.update(rate_limit_headers(generation.handles[0].rate_limits))
    if request.get(ANSWERED_BY):
        response.headers[ANSWERED_BY_HEADER] = request[ANSWERED_BY]


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: give the request its id, turn errors into envelopes, log one line without content."""
    request[REQUEST_ID] = request_id(request.app[CONTEXT].system.chance, request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request[REQUEST_ID])
    clock = request.app[CONTEXT].system.clock
    # The engine's own clock jumps when it goes on with the run of another one.
    started_ns = clock.monotonic_ns()
    response: web.StreamResponse | None = None
    try:
        response = await _answered(request, handler)
        if request.method == "CONNECT":
            # What follows is meant for the other end of a tunnel and must not be read as a request.
            response.force_close()
        return response
    finally:
        release_body(request)
        status = CANCELLED if response is None else response.status
        duration_ns = clock.monotonic_ns() - started_ns
        _count(request, status, duration_ns)
        _log_end(request, response, status, duration_ns)


def _count(request: web.Request, status: int, duration_ns: int) -> None:
    """Count it for /metrics unless it is polled; with the labels of prometheus-fastapi-instrumentator, as in vLLM."""
    resource = request.match_info.route.resource
    route = "none" if resource is None else resource.canonical
    if route not in _NOT_COUNTED:
        method = request.method if request.method in METH_ALL else "other"
        request.app[CONTEXT].count_http_request(route, method, status, duration_ns)


def _log_end(request: web.Request, response: web.StreamResponse | None, status: int, duration_ns: int) -> None:
    """Log one line. Without a response the client has left."""
    fields = request_fields(request) | {
        "status": status,
        "duration_ms": duration_ns // 1_000_000,
    }
    error = None if response is None else response.get(STREAM_ERROR)
    if error is not None:
        fields |= error_fields(error)
    generation = request.get(GENERATION)
    if generation is not None:
        fields |= generation_fields(generation, request.app[CONTEXT].engine.now_ns() - duration_ns)
    if request.path in _POLLED or request.path.startswith((CHAT_PAGE_FOLDER, DASHBOARD_FOLDER)):
        _log.debug("request", **fields)
    elif status >= 500 or (error is not None and error.status >= 500):
        _log.warning("request", **fields)
    else:
        _log.info("request", **fields)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as failure:
        why = why_refused(request.app[REFUSED_PATHS], request.path)
        error = from_http_exception(failure, method=request.method, path=request.path, why=why)
    except ConnectionError:
        raise
    except EventLMError as failure:
        error = api_error(failure)
    except Exception:
        _log.exception("a request failed", path=request.rel_url.raw_path)
        error = internal_error()
    return error.to_response(error_form(request.app[ERROR_FORMS], request.path), request[REQUEST_ID])


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find the holder of the key, and refuse requests without a key of the right scope.

    For unknown paths and methods any key will do.
    """
    keys, scopes, called = request.app[CONTEXT].keys, request.app[SCOPES], request.match_info.handler
    scope = scopes.get(called)
    request[PRINCIPAL] = principal = ANYBODY if called in scopes and scope is None else _find_principal(request, keys)
    if scope is not None and scope not in principal.scopes:
        raise _lacks_scope(scope, keys, sent_one=bool(_sent_key(request)))
    if scope == "inference":
        await request.app[CONTEXT].until_recovered()
    return await handler(request)


def _find_principal(request: web.Request, keys: ApiKeys) -> Principal:
    if not keys:
        return ANYBODY
    sent = _sent_key(request)
    if not sent:
        raise ApiError(
            401,
            "You did not provide an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            headers=ASK_FOR_KEY,
        )
    principal = keys.find(sent)
    if principal is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=ASK_FOR_KEY)
    return principal


def _sent_key(request: web.Request) -> str:
    """The key of a request: its bearer token, or else the header in which Anthropic's clients send it."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get(API_KEY_HEADER, "").strip()


def _lacks_scope(scope: Scope, keys: ApiKeys, *, sent_one: bool) -> ApiError:
    """403, or 401 without a key. If no key has the scope, the message explains how to set one up."""
    message = f"This needs an API key with the scope '{scope}'."
    if not keys.has_scope(scope):
        message += (
            f" None is set up: put [[keys]] with name, sha256 and scopes = ['{scope}'] into a file and start the "
            "server with --api-keys-file FILE."
        )
    if not sent_one:
        return ApiError(401, message, headers=ASK_FOR_KEY)
    return ApiError(403, message, code="missing_scope")


def generating(handler: Handler) -> Handler:
    """A handler that uses the engine: a 503 unless it takes requests, and a drain waits for it."""

    async def run(request: web.Request) -> web.StreamResponse:
        context = request.app[CONTEXT]
        context.check_available()
        context.enter()
        try:
            response = await handler(request)
            # It is over once the client has its reply.
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            context.leave()

    return run
