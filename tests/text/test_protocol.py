"""Bodies that cannot be decoded, and fields that are not supported."""

from __future__ import annotations

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves

BODIES_THAT_ARE_NOT_JSON = {
    "empty": b"",
    "truncated": b'{"model": "test"',
    "garbage": b"\x00\x01\x02",
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "invalid UTF-8 outside a string": b'\xff{"model": "test"}',
    "lone surrogate": b'{"model": "test", "prompt": "\\ud800", "max_tokens": 1}',
    "lone surrogate inside": b'{"model": "test", "prompt": "a\\udc00b", "max_tokens": 1}',
    "NaN": b'{"model": "test", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "test", "prompt": "x", "temperature": -Infinity}',
    "a number without end": b'{"model": "test", "prompt": "x", "temperature": 1e999}',
    "an integer without end": b'{"model": "test", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "deep array": b"[" * 60_000,
    "deep object": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "two documents": b"{}{}",
}


@pytest.mark.parametrize("body", BODIES_THAT_ARE_NOT_JSON.values(), ids=BODIES_THAT_ARE_NOT_JSON.keys())
def test_not_json(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert_error(server.post(path, body), 400, INVALID, message="not valid JSON")
    assert_serves(server)


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"):
        assert_error(server.post(path, body), 400, INVALID, message="not valid JSON: it is empty")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"slo": {"ttft": 1}}, "slo.ttft", "did you mean ttft_ms? Known: ttft_ms, tpot_ms."),
        ({"eventlm": {"timing": True}}, "eventlm.timing", "did you mean timings?"),
        ({"eventlm": {"x": 1}}, "eventlm.x", "'eventlm.x'; known: timings."),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean regex?"),
    ],
)
def test_misspelt_fields_of_objects_that_take_no_others(
    server: RunningServer, fields: dict[str, object], param: str, message: str
) -> None:
    for reply in (server.chat(**fields), server.complete(**fields)):
        assert_error(reply, 400, INVALID, param, "unknown_parameter", message)
    if "structured_outputs" not in fields:
        reply = server.post("/v1/embeddings", {"model": "test", "input": "x", **fields})
        assert_error(reply, 400, INVALID, param, "unknown_parameter", message)


def test_missing_fields(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"model": "test"})
    assert_error(reply, 400, INVALID, "messages", "missing_required_parameter")
    reply = server.post("/v1/embeddings", {"model": "test"})
    assert_error(reply, 400, INVALID, "input", "missing_required_parameter")
    assert_error(server.post("/v1/completions", []), 400, INVALID, None, "invalid_type")


def test_without_a_model_the_one_that_is_served_is_meant(server: RunningServer) -> None:
    for path, body in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/embeddings": {"input": "hi"},
        "/v1/responses": {"input": "hi"},
    }.items():
        for named in (body, {**body, "model": None}):
            reply = server.post(path, named)
            assert (reply.status, reply.json()["model"]) == (200, "test"), reply.data
        assert_error(server.post(path, {**body, "model": "no"}), 404, INVALID, "model", "model_not_found")
    assert {request.scheduling.model for request in server.engine.requests} == {"test"}


@pytest.mark.parametrize(("field", "value"), [("grammar", 'root ::= "a"'), ("json_schema", {"const": 1})])
def test_structures_under_llama_cpp_s_names_are_refused(server: RunningServer, field: str, value: object) -> None:
    for reply in (server.chat(**{field: value}), server.complete(**{field: value})):
        assert_error(reply, 400, INVALID, field, "invalid_value", message="'structured_outputs'")


def test_neutral_values_and_unknown_fields_are_fine(server: RunningServer) -> None:
    reply = server.chat(
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False, tools=[], tool_choice="auto",
        response_format={"type": "text"}, repetition_penalty=1.0, min_p=None, unheard_of={"a": [1]}, stop=None,
        seed=None, user="u",
        metadata={"k" * 64: "v" * 512, "b": ""}, echo=False, continue_final_message=False, length_penalty=1,
    )  # fmt: skip
    assert reply.status == 200
    assert server.complete(n=2, best_of=2).status == 200
    assert server.complete(echo=False, best_of=1, suffix="", logprobs=None).status == 200
