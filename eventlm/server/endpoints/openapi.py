"""The OpenAPI description of the server: made of the table of its endpoints and of the structs in it.

Field by field it says what a request and a reply may be because it is generated from what decodes and encodes them.
What only the handlers check (ids below the vocabulary's size, prompts that fit the context) is in no schema: that is
what a 400 is for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from eventlm._version import __version__
from eventlm.server.auth.principal import Scope
from eventlm.server.errors import CANCELLED, ErrorEnvelope

JSON = "application/json"
SERVER_SENT_EVENTS = "text/event-stream"

#: Statuses of the error envelope: of any endpoint, and of those with a body, a key, or something to generate.
_ANY_ERRORS = (400, 413, 500)
_BODY_ERRORS = (404, 408, 415, 503)
_KEY_ERRORS = (401, 403)
_ENGINE_ERRORS = (429, CANCELLED, 503, 504)
_RETRY_AFTER = (429, 503)
_REF = "#/components/schemas/{name}"
#: The part of a route's path that its handler sees by name, with the pattern that it must match.
_PLACE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class Parameter(NamedTuple):
    """Something that a client may send beside the body."""

    name: str
    place: Literal["query", "header"]
    type: Any
    description: str


class Endpoint(NamedTuple):
    """One operation: its route, and what its description says.

    body: struct of the JSON body, or several of which it is one. reply: type of a 200, None if it is not JSON but
    text. media_types: of the 200, by what the client accepts. chunk: struct of a stream's events, where there can be
    one. generates: uses the engine, see `middleware.generating`. errors: statuses beside those that follow from the
    rest. scope: what a key must allow; None where none is asked for.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: Any | tuple[Any, ...] = None
    reply: Any = None
    media_types: tuple[str, ...] = (JSON,)
    chunk: Any = None
    generates: bool = False
    errors: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    can_be_empty: bool = False
    scope: Scope | None = "inference"


def openapi_path(path: str) -> str:
    """A route's path as OpenAPI writes it: places without their patterns."""
    return _PLACE.sub(r"{\1}", path)


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The description, to be written as JSON."""
    types = list(_types(endpoints))
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, found, strict=True))
    statuses = {status for endpoint in endpoints for status in _errors(endpoint)}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(openapi_path(endpoint.path), {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "eventlm",
            "version": __version__,
            "description": "OpenAI's API. Unknown fields of a request are ignored; every error is an ErrorEnvelope.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": {str(status): _error(status, schemas[ErrorEnvelope]) for status in sorted(statuses)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(endpoints: Sequence[Endpoint]) -> Iterator[Any]:
    """Every type that the document refers to, each once."""
    seen = [ErrorEnvelope]
    for endpoint in endpoints:
        seen += [*_bodies(endpoint), endpoint.reply, endpoint.chunk, *(each.type for each in endpoint.parameters)]
    return iter(dict.fromkeys(type_ for type_ in seen if type_ is not None))


def _bodies(endpoint: Endpoint) -> tuple[Any, ...]:
    return endpoint.body if isinstance(endpoint.body, tuple) else (endpoint.body,)


def _operation(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": " ".join(summary.split()),
        "parameters": list(_parameters(endpoint, schemas)),
        "responses": _responses(endpoint, schemas),
    }
    if description:
        operation["description"] = description
    if endpoint.body is not None:
        bodies = [schemas[body] for body in _bodies(endpoint)]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if endpoint.scope is not None:
        # A server without keys asks nobody for one, but nobody administers it either.
        operation["security"] = [{"key": []}] if endpoint.scope == "admin" else [{}, {"key": []}]
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    words = re.findall(r"\w+", openapi_path(endpoint.path))
    return "_".join([endpoint.method.lower(), *words])


def _parameters(endpoint: Endpoint, schemas: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for name in _PLACE.findall(endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for name, place, type_, description in endpoint.parameters:
        yield {"name": name, "in": place, "schema": schemas[type_], "description": description}


def _responses(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    schema = {"type": "string"} if endpoint.reply is None else schemas[endpoint.reply]
    text = {"type": "string"}
    content: dict[str, Any] = {each: {"schema": schema if each == JSON else text} for each in endpoint.media_types}
    if endpoint.chunk is not None:
        content[SERVER_SENT_EVENTS] = {"schema": schemas[endpoint.chunk]}
    responses: dict[str, Any] = {"200": {"description": "Success", "headers": _headers(200), "content": content}}
    if endpoint.can_be_empty:
        responses["204"] = {"description": "There is nothing to say", "headers": _headers(204)}
    for status in sorted(_errors(endpoint)):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _error(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "Cancelled" if status == CANCELLED else HTTPStatus(status).phrase,
        "headers": _headers(status),
        "content": {JSON: {"schema": schema}},
    }


def _errors(endpoint: Endpoint) -> set[int]:
    """The statuses that the endpoint's errors can have."""
    found = {*_ANY_ERRORS, *endpoint.errors}
    if endpoint.body is not None:
        found.update(_BODY_ERRORS)
    if endpoint.scope is not None:
        found.update(_KEY_ERRORS)
    if endpoint.generates:
        found.update(_ENGINE_ERRORS)
    if _PLACE.search(endpoint.path):
        found.add(404)
    return found


def _headers(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = {
        "x-request-id": {
            "description": "Id of the request, also in the server's log; a client may choose it.",
            "required": True,
            "schema": {"type": "string"},
        }
    }
    if status in _RETRY_AFTER:
        headers["Retry-After"] = {
            "description": "Seconds after which to try again; of a 429 only where that is any use.",
            "required": status != 429,
            "schema": {"type": "integer"},
        }
    return headers
