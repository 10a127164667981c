"""Endpoints for operators. Each needs a key with the scope `admin`, returns the engine's status, and is logged."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import structlog
from aiohttp import web
from msgspec import Struct

from eventlm.engine.admin import (
    Abort,
    AdminAction,
    Drain,
    EngineStatus,
    FlushCache,
    Pause,
    ReadStatus,
    Restart,
    Resume,
    SwapPolicy,
    UnknownPolicyError,
    UnknownRequestError,
)
from eventlm.engine.backends.actions import ListBackends
from eventlm.errors import InputError
from eventlm.formatting import sentence
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response, read_body
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.endpoints.request_info import RequestInfo, any_request_info
from eventlm.server.errors import ApiError
from eventlm.text.decoding import decode_request

_log = structlog.get_logger("eventlm.server")


class PolicyRequest(Struct, kw_only=True):
    """Body of `POST /admin/policy`. `policy` is the name of one that was installed at start."""

    policy: str


async def act(
    request: web.Request, action: AdminAction, details: Mapping[str, str] = MappingProxyType({})
) -> EngineStatus:
    """Carry out an action, and log it with these details. Raises InputError, ApiError, and what the engine raises."""
    try:
        status = await request.app[CONTEXT].engine.administer(action)
    except UnknownPolicyError as error:
        raise InputError("policy", sentence(str(error))) from error
    except UnknownRequestError as error:
        raise ApiError(404, sentence(str(error)), param="id", code="request_not_found") from error
    if not isinstance(action, ReadStatus | ListBackends):
        _log.info("admin", action=str(action.__struct_config__.tag), key=request[PRINCIPAL].name, **details)
    return status


async def _act(request: web.Request, action: AdminAction) -> web.Response:
    return json_response(await act(request, action))


async def status(request: web.Request) -> web.Response:
    """The status of the engine."""
    return await _act(request, ReadStatus())


async def drain(request: web.Request) -> web.Response:
    """Refuse new requests with a 503 and finish the running ones, until `/admin/resume`."""
    return await _act(request, Drain())


async def pause(request: web.Request) -> web.Response:
    """Start no more steps. Requests are still accepted, and wait."""
    return await _act(request, Pause())


async def resume(request: web.Request) -> web.Response:
    """End a drain and a pause."""
    return await _act(request, Resume())


async def restart(request: web.Request) -> web.Response:
    """Start an engine from the code and the configuration that are on the disk, check it, and let it take over the
    requests under way. A 409 says why it cannot; the engine goes on then. Needs `--recover`.
    """
    return await _act(request, Restart())


async def swap_policy(request: web.Request) -> web.Response:
    """Order requests by another of the policies installed at start."""
    body = decode_request(await read_body(request), PolicyRequest, {})
    return json_response(await act(request, SwapPolicy(name=body.policy), {"policy": body.policy}))


async def flush_cache(request: web.Request) -> web.Response:
    """Empty the prefix caches, except for blocks in use; `flushed` is how much was dropped."""
    return await _act(request, FlushCache())


async def abort(request: web.Request) -> web.Response:
    """End a request: by the id of its reply, by its `x-request-id`, or by the seq of its arrival in the trace.

    A 409 that names the replies if several running requests have the same `x-request-id`.
    """
    name = request.match_info["id"]
    return json_response(await act(request, Abort(request=name), {"request": name}))


ADMIN_ENDPOINTS = (
    Endpoint("GET", "/admin/status", status, reply=EngineStatus, errors=(503,), scope="admin"),
    Endpoint("POST", "/admin/drain", drain, reply=EngineStatus, errors=(503,), scope="admin"),
    Endpoint("POST", "/admin/pause", pause, reply=EngineStatus, errors=(503,), scope="admin"),
    Endpoint("POST", "/admin/resume", resume, reply=EngineStatus, errors=(503,), scope="admin"),
    Endpoint("POST", "/admin/restart", restart, reply=EngineStatus, errors=(409, 503), scope="admin"),
    Endpoint("POST", "/admin/policy", swap_policy, PolicyRequest, EngineStatus, errors=(503,), scope="admin"),
    Endpoint("POST", "/admin/cache/flush", flush_cache, reply=EngineStatus, errors=(503,), scope="admin"),
    Endpoint("GET", "/admin/requests/{id:.+}", any_request_info, reply=RequestInfo, errors=(409, 503), scope="admin"),
    Endpoint("POST", "/admin/requests/{id:.+}/abort", abort, reply=EngineStatus, errors=(409, 503), scope="admin"),
)
