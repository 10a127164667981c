"""The endpoints are described."""

from __future__ import annotations

from msgspec import structs

from eventlm.server.responses.endpoints import RESPONSES_ENDPOINTS
from eventlm.server.responses.protocol import IGNORED, ResponsesRequest
from tests.server.conftest import INVALID, RunningServer, assert_error


def test_what_the_description_says_of_a_response(server: RunningServer) -> None:
    document = server.request("GET", "/openapi.json").json()
    operation = document["paths"]["/v1/responses"]["post"]
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/Response"}
    events = content["text/event-stream"]["schema"]
    assert {"$ref": "#/components/schemas/OutputTextDelta"} in events["anyOf"]
    assert set(document["paths"]["/v1/responses/input_tokens"]) == {"post"}


def test_compaction_is_refused_by_name(server: RunningServer) -> None:
    reply = server.post("/v1/responses/compact", {"model": "test", "input": "hi"})
    words = "POST /v1/responses/compact is not supported: "
    assert_error(reply, 405, INVALID, None, "not_supported", message=words)
    assert "'truncation'" in reply.json()["error"]["message"]


def test_the_lists_of_parameters_name_fields() -> None:
    fields = {field.encode_name for field in structs.fields(ResponsesRequest)}
    assert set(IGNORED) <= fields
    assert all(endpoint.refused for endpoint in RESPONSES_ENDPOINTS[:2])
    assert not IGNORED.keys() & RESPONSES_ENDPOINTS[0].refused.keys()
