"""Completions and embeddings that other servers make."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.forwarding.conftest import LOGPROBS, forwarded


def test_each_prompt_is_a_request(gateway: RunningServer) -> None:
    gateway.engine.answer = [AnswerDelta("Hello", 1), AnswerEnd("length", AnswerUsage(prompt=3, completion=4), None)]
    reply = gateway.complete(prompt=["größer", [7, 100_000]], n=2, suffix="end", echo=True, made_up=1).json()
    assert [choice["text"] for choice in reply["choices"]] == ["Hello"] * 4
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (6, 16)
    same = {"suffix": "end", "echo": True, "made_up": 1}
    assert forwarded(gateway, 0) == same | {"prompt": "größer"}
    assert forwarded(gateway, 1) == same | {"prompt": [7, 100_000]}
    texts, ids = (request.prompt_token_ids for request in gateway.engine.requests)
    assert (len(texts), ids) == (2, [7, 100_000])


def columns(token: str, logprob: float, top: dict[str, float]) -> Any:
    return {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [0]}


@pytest.mark.parametrize(
    "told",
    [
        [[entry] for entry in LOGPROBS],
        [columns("Hel", -0.5, {"Hel": -0.5, "By": -1.5}), columns("lo", -0.25, {"lo": -0.25})],
    ],
    ids=["as a chat", "as a completion"],
)
def test_log_probabilities_take_the_form_of_completions(gateway: RunningServer, told: list[Any]) -> None:
    gateway.engine.answer = [AnswerDelta("x", 1, logprobs=msgspec.json.encode(each)) for each in told]
    gateway.engine.answer.append(AnswerEnd("stop"))
    expected = {
        "tokens": ["Hel", "lo"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"Hel": -0.5, "By": -1.5}, {"lo": -0.25}],
        "text_offset": [0, 3],
    }
    assert gateway.complete(logprobs=1).json()["choices"][0]["logprobs"] == expected
    gateway.engine.step_seconds = 0.02
    found: dict[str, list[Any]] = {}
    for chunk in gateway.complete(logprobs=1, stream=True).events()[:-1]:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            found[name] = found.get(name, []) + values
    assert found == expected
    ollama = {"model": "test", "prompt": "hi", "raw": True, "logprobs": True, "top_logprobs": 1, "stream": False}
    assert [each["logprob"] for each in gateway.post("/api/generate", ollama).json()["logprobs"]] == [-0.5, -0.25]


@pytest.mark.parametrize("told", [b'{"tokens":["a"],"token_logprobs":[]}', b'[{"x":1}]', b"7"])
def test_log_probabilities_of_no_known_form(gateway: RunningServer, told: bytes) -> None:
    gateway.engine.answer = [AnswerDelta("x", 1, logprobs=told), AnswerEnd("stop")]
    assert_error(gateway.complete(logprobs=1), 502, "server_error", None, "backend_protocol")
    assert_error(gateway.chat(logprobs=True), 502, "server_error", None, "backend_protocol")


def test_token_ids_are_those_of_the_backend(gateway: RunningServer) -> None:
    gateway.engine.answer = [AnswerDelta("Hello", 2, token_ids=[5, 6]), AnswerEnd("stop")]
    [choice] = gateway.complete(return_token_ids=True).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5, 6], None)
    assert forwarded(gateway)["return_token_ids"] is True


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 128}, "prompt"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_is_refused(gateway: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert_error(gateway.complete(**fields), 400, INVALID, param, "invalid_value")


def test_one_choice_may_be_the_best_of_several(gateway: RunningServer) -> None:
    assert gateway.complete(best_of=3).status == 200
    assert forwarded(gateway)["best_of"] == 3


VECTOR = [3.0, 4.0]


@pytest.fixture
def embedder(gateway: RunningServer) -> RunningServer:
    gateway.engine.answer = [
        AnswerDelta(embedding=struct.pack("<2f", *VECTOR)),
        AnswerEnd("complete", AnswerUsage(prompt=5)),
    ]
    return gateway


def test_embeddings_stay_as_the_backend_made_them(embedder: RunningServer) -> None:
    fields = {"model": "test", "input": ["a text", [1, 2]], "dimensions": 2, "made_up": 1}
    reply = embedder.post("/v1/embeddings", fields).json()
    assert [each["embedding"] for each in reply["data"]] == [VECTOR, VECTOR]
    assert reply["usage"]["prompt_tokens"] == 10
    assert [forwarded(embedder, index)["input"] for index in (0, 1)] == ["a text", [1, 2]]
    assert forwarded(embedder) == {"input": [1, 2], "dimensions": 2, "made_up": 1}
    assert {request.scheduling.kind for request in embedder.engine.requests} == {"pool"}


def test_the_form_of_a_vector_is_ours(embedder: RunningServer) -> None:
    fields = {"model": "test", "input": "a", "encoding_format": "base64", "normalize": True}
    [vector] = embedder.post("/v1/embeddings", fields).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(vector["embedding"])) == pytest.approx((0.6, 0.8))
    assert forwarded(embedder) == {"input": "a"}


def test_embeddings_of_other_apis(embedder: RunningServer) -> None:
    ollama = embedder.post("/api/embed", {"model": "test", "input": "a", "dimensions": 2}).json()
    assert ollama["embeddings"] == [pytest.approx([0.6, 0.8])]
    assert forwarded(embedder) == {"dimensions": 2, "input": "a"}
    llama = embedder.post("/embedding", {"content": "b", "embd_normalize": -1}).json()
    assert llama[0]["embedding"] == [VECTOR]
    assert forwarded(embedder) == {"input": "b"}
