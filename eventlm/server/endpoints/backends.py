"""`/admin/backends`: the other servers that answer requests, which come and go while this one runs."""

from __future__ import annotations

from typing import Any, Literal

from aiohttp import web
from msgspec import UNSET, Struct

from eventlm.config.backends import BackendSpec, parse_backend
from eventlm.config.secrets import hide_keys
from eventlm.engine.backends.actions import (
    AddBackend,
    BackendAction,
    DrainBackend,
    ListBackends,
    RemoveBackend,
    ResumeBackend,
)
from eventlm.engine.backends.backend_set import BackendStatus, UnknownBackendError
from eventlm.errors import InputError, UsageError
from eventlm.formatting import sentence
from eventlm.server.context import json_response, read_body, read_query
from eventlm.server.endpoints.admin import act
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import ApiError
from eventlm.server.middleware import Handler
from eventlm.text.decoding import decode_request

#: What names a file or a variable of this host: who may add backends may not read those.
_OF_THIS_HOST = ("key_env", "key_file", "ca_file")


class BackendRequest(Struct, kw_only=True):
    """Body of `POST /admin/backends`. backend: as for `--backend`: `URL,KEY=VALUE,...`. model: whose backend it
    becomes; needed if several models have backends.
    """

    backend: str
    model: str = ""


class BackendsReply(Struct, frozen=True):
    """All backends. None of their keys is shown."""

    backends: list[BackendStatus]


class _Query(Struct, kw_only=True):
    model: str = ""


async def list_backends(request: web.Request) -> web.Response:
    """The backends: which are up, what each has of this server, and how much it may have."""
    return await _act(request, ListBackends())


async def add_backend(request: web.Request) -> web.Response:
    """Add a backend. It gets requests as soon as it answers."""
    body = decode_request(await read_body(request), BackendRequest, {})
    return await _act(request, AddBackend(spec=_parse(body.backend), model=body.model))


async def remove_backend(request: web.Request) -> web.Response:
    """Remove a backend once it has finished the requests it has."""
    return await _act(request, RemoveBackend(name=request.match_info["name"], model=_model(request)))


async def drain_backend(request: web.Request) -> web.Response:
    """Send a backend no more requests. It finishes those it has."""
    return await _act(request, DrainBackend(name=request.match_info["name"], model=_model(request)))


async def resume_backend(request: web.Request) -> web.Response:
    """Send a drained backend requests again."""
    return await _act(request, ResumeBackend(name=request.match_info["name"], model=_model(request)))


async def _act(request: web.Request, action: BackendAction) -> web.Response:
    details = {} if isinstance(action, ListBackends) else {"backend": action.name}
    try:
        status = await act(request, action, details)
    except UnknownBackendError as error:
        raise ApiError(404, sentence(str(error)), param="name", code="backend_not_found") from error
    except UsageError as error:
        raise InputError("backend", sentence(str(error))) from error
    return json_response(BackendsReply([] if status.backends is UNSET else status.backends))


def _parse(text: str) -> BackendSpec:
    """Raises InputError."""
    keys = {part.partition("=")[0].strip() for part in text.split(",")[1:]}
    for key in _OF_THIS_HOST:
        if key in keys:
            raise InputError("backend", f"{key} is for --backend: a request says what is in it, such as key=KEY.")
    try:
        spec = parse_backend(text)
    except UsageError as error:
        raise InputError("backend", f"{str(error).removeprefix('--backend ')}.") from error
    if not isinstance(spec, BackendSpec):
        raise InputError("backend", f"{hide_keys(text)}: dns: and file: are for --backend; give a URL.")
    return spec


def _model(request: web.Request) -> str:
    return read_query(request, _Query).model


_MODEL = Parameter(
    "model", "query", str, "The model whose backend it is; needed if several have a backend of this name."
)
_NAME = "/admin/backends/{name:.+}"


def _endpoint(method: Literal["GET", "POST", "DELETE"], path: str, handler: Handler, body: Any = None) -> Endpoint:
    parameters = (_MODEL,) if path.startswith(_NAME) else ()
    return Endpoint(method, path, handler, body, BackendsReply, errors=(503,), parameters=parameters, scope="admin")


BACKEND_ENDPOINTS = (
    _endpoint("GET", "/admin/backends", list_backends),
    _endpoint("POST", "/admin/backends", add_backend, BackendRequest),
    _endpoint("POST", f"{_NAME}/drain", drain_backend),
    _endpoint("POST", f"{_NAME}/resume", resume_backend),
    _endpoint("DELETE", _NAME, remove_backend),
)
