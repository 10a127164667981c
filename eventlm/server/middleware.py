"""What happens to every request: an id, a line in the log, the error envelope, the key check."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web
from aiohttp.hdrs import METH_ALL

from eventlm.errors import InputError
from eventlm.server.auth.api_keys import ApiKeys
from eventlm.server.auth.principal import ANYBODY, PRINCIPAL, Principal, Scope
from eventlm.server.auth.rate_limit_headers import rate_limit_headers
from eventlm.server.context import CONTEXT, release_body
from eventlm.server.errors import CANCELLED, ApiError, from_http_exception, from_input_error, internal_error
from eventlm.server.http.headers import REQUEST_ID_HEADER, SANE_REQUEST_ID, SERVER_NAME, request_id
from eventlm.text.generation import Generation

_log = structlog.get_logger("eventlm.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Id of a request, also on every line that is logged while it is handled.
REQUEST_ID = web.RequestKey("request_id", str)
#: What a request generates, once the engine has it.
GENERATION = web.RequestKey("generation", Generation)
#: Sent with every 401.
ASK_FOR_KEY = {"WWW-Authenticate": "Bearer"}
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
#: What monitors poll: no news unless one looks for it.
_POLLED = (HEALTH_PATH, METRICS_PATH)
_NOT_COUNTED = (*_POLLED, "/version")
#: What a key must allow, by the handler; None where none is asked for.
SCOPES = web.AppKey("scopes", dict[Handler, Scope | None])
#: The error with which a stream ended whose status had long been sent.
STREAM_ERROR = web.ResponseKey("stream_error", ApiError)


def take_request_id(request: web.Request, named: str | None) -> None:
    """`request_id` of a body: the request's id, unless its header has one. Raises ApiError for one that is not sane."""
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
    """Signal `on_response_prepare`: every reply carries the id, streams too, and what is left of its key's limits."""
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    response.headers["Server"] = SERVER_NAME
    generation = request.get(GENERATION)
    if generation is not None and generation.handles[0].rate_limits is not None:
        response.headers.update(rate_limit_headers(generation.handles[0].rate_limits))


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: give the request its id, turn errors into envelopes, log one line without any content."""
    request[REQUEST_ID] = request_id(request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request[REQUEST_ID])
    started_ns = time.perf_counter_ns()
    response: web.StreamResponse | None = None
    try:
        response = await _with_envelope(request, handler)
        return response
    finally:
        release_body(request)
        status = CANCELLED if response is None else response.status
        _count(request, status)
        _log_end(request, response, status, started_ns)


def _count(request: web.Request, status: int) -> None:
    """For /metrics, with the labels of prometheus-fastapi-instrumentator and without what monitors poll, as in vLLM."""
    resource = request.match_info.route.resource
    route = "none" if resource is None else resource.canonical
    if route not in _NOT_COUNTED:
        method = request.method if request.method in METH_ALL else "other"
        request.app[CONTEXT].count_http_request(route, method, status)


def _log_end(request: web.Request, response: web.StreamResponse | None, status: int, started_ns: int) -> None:
    """One line for each request; without a response its client has left."""
    fields: dict[str, Any] = {
        "method": request.method,
        "path": _logged_path(request),
        "status": status,
        "duration_ms": (time.perf_counter_ns() - started_ns) // 1_000_000,
    }
    principal = request.get(PRINCIPAL)
    if principal is not None and principal.name:
        fields["key"] = principal.name
    error = None if response is None else response.get(STREAM_ERROR)
    if error is not None:
        # An error ended the stream, which its status does not tell.
        body = error.envelope.error
        outcome = "cancelled" if error.status == CANCELLED else "cut"
        fields |= {"outcome": outcome, "error": body.code or body.type, "error_status": error.status}
    generation = request.get(GENERATION)
    if generation is not None:
        fields |= _generated(generation, started_ns)
    if request.path in _POLLED:
        _log.debug("request", **fields)
    elif status >= 500 or (error is not None and error.status >= 500):
        _log.warning("request", **fields)
    else:
        _log.info("request", **fields)


def _logged_path(request: web.Request) -> str:
    """In its quoted form: what it stands for may be anything, also what a terminal obeys."""
    return request.rel_url.raw_path


def _generated(generation: Generation, started_ns: int) -> dict[str, Any]:
    """What an operator wants to know of a request to the engine, in numbers and reasons."""
    counts = generation.token_counts()
    fields: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "output_tokens": generation.num_tokens,
    }
    if generation.knows_cached_tokens:
        fields["cached_tokens"] = counts.cached
    if generation.first_token_ns:
        fields["ttft_ms"] = (generation.first_token_ns - started_ns) // 1_000_000
    if generation.finish_reasons:
        fields["finish_reason"] = ",".join(sorted(generation.finish_reasons))
    if generation.num_choices > 1:
        fields["choices"] = generation.num_choices
    return fields


async def _with_envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await _answered(request, handler)
    if request.method == "CONNECT":
        # What follows would be for the other end of a tunnel, and may not be read as a request.
        response.force_close()
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.to_response()
    except InputError as error:
        return from_input_error(error).to_response()
    except web.HTTPException as error:
        return from_http_exception(error, method=request.method, path=request.path).to_response()
    except ConnectionError:
        raise
    except Exception:
        _log.exception("a request failed", path=_logged_path(request))
        return internal_error().to_response()


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say who asks, and refuse those who have no key of the right scope.

    That a path does not exist, or has no such method, is told to whoever has any key.
    """
    keys, scopes, called = request.app[CONTEXT].keys, request.app[SCOPES], request.match_info.handler
    scope = scopes.get(called)
    request[PRINCIPAL] = principal = ANYBODY if called in scopes and scope is None else _find_principal(request, keys)
    if scope is not None and scope not in principal.scopes:
        raise _lacks_scope(scope, keys, sent_one="Authorization" in request.headers)
    return await handler(request)


def _find_principal(request: web.Request, keys: ApiKeys) -> Principal:
    if not keys:
        return ANYBODY
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not sent.strip():
        raise ApiError(401, "You did not provide an API key: send 'Authorization: Bearer KEY'.", headers=ASK_FOR_KEY)
    principal = keys.find(sent.strip())
    if principal is None:
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers=ASK_FOR_KEY)
    return principal


def _lacks_scope(scope: Scope, keys: ApiKeys, *, sent_one: bool) -> ApiError:
    """403, or 401 for who sent no key at all; where no key has the scope it says how to set one up."""
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
    """A handler that uses the engine: refused with a 503 unless it can take requests, and waited for at the end."""

    async def run(request: web.Request) -> web.StreamResponse:
        context = request.app[CONTEXT]
        context.check_available()
        context.enter()
        try:
            response = await handler(request)
            # It is over when the client has its reply, and not when that is made.
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            context.leave()

    return run
