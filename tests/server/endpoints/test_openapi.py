"""The description of the server: whole, valid, and true to the application's routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from eventlm.server.app import ENDPOINTS, ERROR_FORMS_BY_PATH, make_app
from eventlm.server.endpoints.openapi import openapi_document
from tests.server.conftest import RunningServer

FORMS = ERROR_FORMS_BY_PATH.values()
METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_document(ENDPOINTS, ERROR_FORMS_BY_PATH)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in METHODS & item.keys():
            yield method, path, item[method]


def references(value: Any) -> Iterator[str]:
    """Every `$ref` below a value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_route_of_the_application_is_described(server: RunningServer) -> None:
    """A HEAD is a GET without its body; everything else must be in the document, and nothing more."""
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in make_app(server.context).router.routes()
        if route.method != "HEAD" and route.resource is not None
    }
    served = server.request("GET", "/openapi.json").json()
    assert routes == {(method, path) for method, path, _ in operations(served)}


def test_it_is_served_as_it_is_made(server: RunningServer, document: dict[str, Any]) -> None:
    reply = server.request("GET", "/openapi.json")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == document


def test_it_needs_no_key(start_server: Callable[..., RunningServer]) -> None:
    assert start_server(api_key="secret").request("GET", "/openapi.json").status == 200


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert "#/components/schemas/ErrorEnvelope" in found
    for reference in found:
        value = document
        for name in reference.removeprefix("#/").split("/"):
            value = value[name]


def test_every_schema_is_a_json_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_schema_and_operation_says_what_it_is(document: dict[str, Any]) -> None:
    """In the words of the structs and the handlers."""
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("description"), name
    for method, path, operation in operations(document):
        assert operation["summary"], (method, path)
        assert "`" not in operation["operationId"]
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids)


def test_errors_are_envelopes_of_the_statuses_that_the_endpoint_has(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    expected = {"200", "400", "401", "403", "404", "408", "413", "415", "422", "429", "499", "500", "503", "504"}
    assert set(chat) == expected
    assert set(document["paths"]["/version"]["get"]["responses"]) == {"200", "400", "413", "500"}
    for status, response in document["components"]["responses"].items():
        content = response["content"]["application/json"]
        # Those of APIs with another form are named after it.
        form = status[3:] or "ErrorEnvelope"
        assert content["schema"] == {"$ref": f"#/components/schemas/{form}"}
        assert ("Retry-After" in response["headers"]) == (status[:3] in ("429", "503"))


def test_a_stream_is_described_by_its_chunks(document: dict[str, Any]) -> None:
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/ChatCompletionChunk"}


def test_alternatives_are_described(document: dict[str, Any]) -> None:
    models = document["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in ("ModelList", "ModelPage")]
    assert models == {"anyOf": refs}


def test_what_holds_beside_a_grammar_is_described(server: RunningServer) -> None:
    schemas = server.request("GET", "/openapi.json").json()["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        for field in ("allowed_token_ids", "bad_words", "min_tokens"):
            kinds = schemas[name]["properties"][field]["anyOf"]
            assert any("Beside a grammar" in kind.get("description", "") for kind in kinds), (name, field)
