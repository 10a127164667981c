"""The OpenAPI description of the server, generated from the table of endpoints and the structs that it uses.

Checks of the handlers (ids below the vocabulary's size, prompts that fit the context) are not in the schemas.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from eventlm._version import __version__
from eventlm.server.auth.api_keys import Scope
from eventlm.server.errors import CANCELLED, IDEMPOTENCY_HEADER, ErrorEnvelope, ErrorForm, error_form
from eventlm.server.idempotency import KeyOfRequest
from eventlm.server.reply_format import SERVER_SENT_EVENTS
from eventlm.server.scheduling import CLASS_HEADER, SESSION_HEADER

JSON = "application/json"

#: Statuses of errors: of all endpoints, and of those with a body, with a key, and that generate.
_ANY_ERRORS = (400, 413, 500)
_BODY_ERRORS = (404, 408, 415, 503)
_KEY_ERRORS = (401, 403)
_ENGINE_ERRORS = (422, 429, CANCELLED, 503, 504)
_RETRY_AFTER = (429, 503)
_REF = "#/components/schemas/{name}"
#: A named part of a route's path, with its pattern.
_NAMED_PART = re.compile(r"\{(\w+)(?::[^}]*)?\}")


class Parameter(NamedTuple):
    """A parameter in the query or a header."""

    name: str
    location: Literal["query", "header"]
    type: Any
    description: str


_CLASS = Parameter(CLASS_HEADER, "header", str, "The service class, where requests may choose it.")
_SESSION = Parameter(
    SESSION_HEADER, "header", str, "Requests of one session go to the same replica under some routers."
)

_KEY = Parameter(
    IDEMPOTENCY_HEADER, "header", KeyOfRequest, "With the same key, the same request joins the reply to the first."
)


class Endpoint(NamedTuple):
    """One operation: its route and its description.

    body: struct of the body, or alternatives, which comes as `body_type`. reply: type of a 200, or alternatives; None
    for text. media_types: of the 200. chunk: struct of a stream's events, which come as `chunk_type`. generates: uses
    the engine, see `middleware.generating`. errors: further statuses. scope: needed by the key; None: no key is needed.
    ignored: parameters that are accepted and change nothing, with the reason. only: the only parameters with an effect,
    if the body has others too. refused: parameters that are an error unless they have one of these values.
    """

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: Any | tuple[Any, ...] = None
    reply: Any | tuple[Any, ...] = None
    media_types: tuple[str, ...] = (JSON,)
    chunk: Any = None
    chunk_type: str = SERVER_SENT_EVENTS
    generates: bool = False
    errors: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    can_be_empty: bool = False
    body_type: str = JSON
    scope: Scope | None = "inference"
    ignored: Mapping[str, str] = {}
    only: tuple[str, ...] = ()
    refused: Mapping[str, tuple[Any, ...]] = {}

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """Those of the query and of headers, with the headers that all generating endpoints take."""
        return (*self.parameters, _CLASS, _SESSION, _KEY) if self.generates else self.parameters


def openapi_path(path: str) -> str:
    """A route's path in OpenAPI's form, without patterns."""
    return _NAMED_PART.sub(r"{\1}", path)


def openapi_document(endpoints: Sequence[Endpoint], forms: dict[str, ErrorForm]) -> dict[str, Any]:
    """The description as a JSON object. forms: of errors, by the beginning of their paths."""
    types = list(_types(endpoints, forms))
    found, components = msgspec.json.schema_components(types, ref_template=_REF)
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    errors: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        form = error_form(forms, endpoint.path)
        envelope = ErrorEnvelope if form is None else form.envelope
        names = {status: _error_name(status, envelope) for status in sorted(_errors(endpoint))}
        errors |= {name: _error(status, schemas[envelope]) for status, name in names.items()}
        operation = _operation(endpoint, schemas, names)
        paths.setdefault(openapi_path(endpoint.path), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "eventlm",
            "version": __version__,
            "description": "The APIs of OpenAI, Anthropic, vLLM, llama.cpp and Ollama. Unknown fields of a request are "
            "ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": dict(sorted(errors.items())),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "key_header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _error_name(status: int, envelope: Any) -> str:
    """The name of an error in the components."""
    return str(status) if envelope is ErrorEnvelope else f"{status}{envelope.__name__}"


def _types(endpoints: Sequence[Endpoint], forms: dict[str, ErrorForm]) -> Iterator[Any]:
    """Each type in the document once."""
    seen = [ErrorEnvelope, *(form.envelope for form in forms.values())]
    for endpoint in endpoints:
        seen += [*_alternatives(endpoint.body), *_alternatives(endpoint.reply), endpoint.chunk]
        seen += [each.type for each in endpoint.all_parameters]
    return iter(dict.fromkeys(type_ for type_ in seen if type_ is not None))


def _alternatives(types: Any) -> tuple[Any, ...]:
    return types if isinstance(types, tuple) else (types,)


def _any_of(types: Any, schemas: dict[Any, Any]) -> dict[str, Any]:
    """The schema of a type, or of alternatives."""
    found = [schemas[each] for each in _alternatives(types)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _notes(endpoint: Endpoint) -> Iterator[str]:
    """What happens to parameters that are not honoured."""
    if endpoint.only:
        yield f"Only these have an effect: {', '.join(f'`{name}`' for name in endpoint.only)}."
    if endpoint.ignored:
        reasons = "; ".join(f"`{name}` ({reason})" for name, reason in endpoint.ignored.items())
        yield f"Accepted and ignored: {reasons}."
    if endpoint.refused:
        yield f"Refused: {', '.join(f'`{name}`{unless(neutral)}' for name, neutral in endpoint.refused.items())}."


def unless(neutral: tuple[Any, ...]) -> str:
    """In which case a refused parameter is accepted, in words."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    return f" (unless {values})" if values else ""


def _operation(endpoint: Endpoint, schemas: dict[Any, Any], errors: dict[int, str]) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(endpoint.handler) or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": " ".join(summary.split()),
        "parameters": list(_parameters(endpoint, schemas)),
        "responses": _responses(endpoint, schemas, errors),
    }
    if paragraphs := [*filter(None, [description]), *_notes(endpoint)]:
        operation["description"] = "\n\n".join(paragraphs)
    if endpoint.body is not None:
        content = {endpoint.body_type: {"schema": _any_of(endpoint.body, schemas)}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.scope is not None:
        # A server without keys needs none, except for admin endpoints, which cannot be used then.
        keys: list[dict[str, list[str]]] = [{"key": []}, {"key_header": []}]
        operation["security"] = keys if endpoint.scope == "admin" else [{}, *keys]
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    words = re.findall(r"\w+", openapi_path(endpoint.path))
    return "_".join([endpoint.method.lower(), *words])


def _parameters(endpoint: Endpoint, schemas: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for name in _NAMED_PART.findall(endpoint.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for name, location, type_, description in endpoint.all_parameters:
        yield {"name": name, "in": location, "schema": schemas[type_], "description": description}


def _responses(endpoint: Endpoint, schemas: dict[Any, Any], errors: dict[int, str]) -> dict[str, Any]:
    schema = {"type": "string"} if endpoint.reply is None else _any_of(endpoint.reply, schemas)
    text = {"type": "string"}
    content: dict[str, Any] = {each: {"schema": schema if each == JSON else text} for each in endpoint.media_types}
    if endpoint.chunk is not None:
        content[endpoint.chunk_type] = {"schema": schemas[endpoint.chunk]}
    responses: dict[str, Any] = {"200": {"description": "Success", "headers": _headers(200), "content": content}}
    if endpoint.can_be_empty:
        responses["204"] = {"description": "The client has received everything", "headers": _headers(204)}
    for status, name in errors.items():
        responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return responses


def _error(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "Cancelled" if status == CANCELLED else HTTPStatus(status).phrase,
        "headers": _headers(status),
        "content": {JSON: {"schema": schema}},
    }


def _errors(endpoint: Endpoint) -> set[int]:
    """The statuses of the endpoint's errors."""
    found = {*_ANY_ERRORS, *endpoint.errors}
    if endpoint.body is not None:
        found.update(_BODY_ERRORS)
    if endpoint.scope is not None:
        found.update(_KEY_ERRORS)
    if endpoint.generates:
        found.update(_ENGINE_ERRORS)
    if _NAMED_PART.search(endpoint.path):
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
