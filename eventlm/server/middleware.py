"""What happens to every request: an id, a line in the log, the error envelope, the key check."""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import structlog
from aiohttp import web

from eventlm.server.context import CONTEXT
from eventlm.server.errors import ApiError, from_http_exception, internal_error

_log = structlog.get_logger("eventlm.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "x-request-id"
#: Id of the request that the current task handles.
CURRENT_REQUEST_ID: ContextVar[str] = ContextVar("request_id")
#: Ids from clients that are echoed; anything else is replaced, so that logs and headers stay clean.
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
#: What servers log for a client that left before its reply; never sent.
_CLIENT_LEFT = 499
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
#: What monitors poll: no news unless one looks for it.
_POLLED = (HEALTH_PATH, METRICS_PATH)
#: The error with which a stream ended whose status had long been sent.
STREAM_ERROR = web.ResponseKey("stream_error", ApiError)


def request_id(request: web.BaseRequest) -> str:
    """The client's id for the request if it sent a sane one, else a fresh one."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return sent if _SANE_REQUEST_ID.fullmatch(sent) else f"req-{secrets.token_hex(16)}"


async def set_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: every reply carries the id, streams too."""
    response.headers[REQUEST_ID_HEADER] = CURRENT_REQUEST_ID.get()


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: give the request its id, turn errors into envelopes, log one line without any content."""
    CURRENT_REQUEST_ID.set(request_id(request))
    started_ns = time.perf_counter_ns()
    status = _CLIENT_LEFT
    outcome: dict[str, str | int] = {}
    try:
        response = await _with_envelope(request, handler)
        status, outcome = response.status, _outcome(response)
        return response
    finally:
        log = _log.debug if request.path in _POLLED else _log.info
        log(
            "request",
            request_id=CURRENT_REQUEST_ID.get(),
            method=request.method,
            path=request.path,
            status=status,
            duration_ms=(time.perf_counter_ns() - started_ns) // 1_000_000,
            **outcome,
        )


def _outcome(response: web.StreamResponse) -> dict[str, str | int]:
    """What the log says of a stream that an error ended, which its status does not tell."""
    error = response.get(STREAM_ERROR)
    if error is None:
        return {}
    body = error.envelope.error
    return {"outcome": "cut", "error": body.code or body.type, "error_status": error.status}


async def _with_envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.to_response()
    except web.HTTPException as error:
        return from_http_exception(error, method=request.method, path=request.path).to_response()
    except ConnectionError:
        raise
    except Exception:
        _log.exception("a request failed", request_id=CURRENT_REQUEST_ID.get(), path=request.path)
        return internal_error().to_response()


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything under /v1 needs the configured key, if there is one."""
    api_key = request.app[CONTEXT].config.api_key
    if api_key and request.path.startswith("/v1"):
        _check_key(request, api_key)
    return await handler(request)


def _check_key(request: web.Request, api_key: str) -> None:
    headers = {"WWW-Authenticate": "Bearer"}
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not sent.strip():
        raise ApiError(401, "You did not provide an API key: send 'Authorization: Bearer KEY'.", headers=headers)
    if not hmac.compare_digest(sent.strip().encode("utf-8", "surrogateescape"), api_key.encode()):
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=headers)


def generating(handler: Handler) -> Handler:
    """A handler that uses the engine: refused with a 503 unless it can take requests, and waited for at the end."""

    async def run(request: web.Request) -> web.StreamResponse:
        context = request.app[CONTEXT]
        context.check_available()
        context.enter()
        try:
            return await handler(request)
        finally:
            context.leave()

    return run
