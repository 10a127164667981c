"""Embeddings over HTTP, from an engine whose vectors are known."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.engine.request import EngineUnavailableError, QueueFullError
from eventlm.server.openai.embeddings import _truncated
from eventlm.text.tokenizer import CheckpointTokenizer
from tests.http_exchange import Reply
from tests.processes import wait_until
from tests.server.checkpoints import byte_level
from tests.server.conftest import INVALID, RunningServer, assert_error

CONTEXT = 256


def embed(server: RunningServer, **fields: Any) -> Reply:
    return server.post("/v1/embeddings", {"model": "test", "input": "hi", **fields})


def unit(token_ids: list[int]) -> list[float]:
    """What the double says of a prompt, at length 1."""
    vector = [float(len(token_ids)), float(sum(token_ids)), *[0.0] * 14]
    length = math.hypot(*vector)
    return [value / length for value in vector]


HI, HO = [256, 104, 105], [256, 104, 111]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [HI]),
        (["hi", "ho"], [HI, HO]),
        ([104, 105], [[104, 105]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_the_official_client(server: RunningServer, given: Any, prompts: list[list[int]], encoding_format: Any) -> None:
    settings: Any = {} if encoding_format is None else {"encoding_format": encoding_format}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.embeddings.create(model="test", input=given, user="me", **settings)
    assert isinstance(reply, openai.types.CreateEmbeddingResponse)
    assert (reply.object, reply.model) == ("list", "test")
    assert [each.index for each in reply.data] == list(range(len(prompts)))
    for each, prompt in zip(reply.data, prompts, strict=True):
        values = each.embedding
        if isinstance(values, str):
            values = list(struct.unpack("<16f", base64.b64decode(values)))
        assert values == pytest.approx(unit(prompt), abs=1e-6)
    num_tokens = sum(map(len, prompts))
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_and_numbers_are_the_same_vector(server: RunningServer) -> None:
    numbers = embed(server).json()["data"][0]["embedding"]
    text = embed(server, encoding_format="base64").json()["data"][0]["embedding"]
    assert struct.pack("<16f", *numbers) == base64.b64decode(text)


def test_dimensions_are_the_first_ones_normalised_again(server: RunningServer) -> None:
    [one] = embed(server, dimensions=2).json()["data"]
    assert one["embedding"] == pytest.approx(unit(HI)[:2], abs=1e-6)
    [one] = embed(server, dimensions=1, input=[7]).json()["data"]
    assert one["embedding"] == [1.0]


def test_as_the_model_gives_them(server: RunningServer) -> None:
    [one] = embed(server, normalize=False).json()["data"]
    assert one["embedding"][:2] == [3.0, 465.0]


def test_what_the_engine_is_asked(server: RunningServer) -> None:
    embed(server, input=["a", "b"], priority=-3, cache_salt="salt", add_special_tokens=False)
    first, second = server.engine.requests
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([97], [98])
    assert (first.scheduling.kind, first.scheduling.priority, first.cache_salt, first.n) == ("pool", -3, "salt", 1)
    assert (first.sampling.pooling, first.sampling.max_tokens, first.scheduling.skip_cache_read) == (
        "last",
        None,
        False,
    )
    assert 0 < first.scheduling.received_ns <= first.scheduling.ready_ns


@pytest.mark.parametrize(("option", "field", "pooling"), [("mean", None, "mean"), ("mean", "last", "last")])
def test_pooling_is_an_option_and_a_field(start_server: Any, option: str, field: str | None, pooling: str) -> None:
    server = start_server(pooling=option)
    assert embed(server, pooling=field).status == 200
    [request] = server.engine.requests
    assert request.sampling.pooling == pooling
    # The mean is over what is computed, so all must be.
    assert request.scheduling.skip_cache_read == (pooling == "mean")


@pytest.mark.parametrize(
    ("kept", "given", "expected"),
    [
        (2, [1, 2, 3], [2, 3]),
        (3, [1, 2, 3], [1, 2, 3]),
        (-1, list(range(300)), list(range(300 - CONTEXT, 300))),
        (3, "abcdef", [256, ord("e"), ord("f")]),
        (1, "abcdef", [ord("f")]),
    ],
)
def test_truncation_keeps_the_last_tokens(server: RunningServer, kept: int, given: Any, expected: list[int]) -> None:
    reply = embed(server, truncate_prompt_tokens=kept, input=given)
    assert reply.status == 200, reply.data
    assert server.engine.requests[-1].prompt_token_ids == expected


def test_truncation_keeps_special_tokens_on_both_sides(tmp_path: Path) -> None:
    tokenizer = CheckpointTokenizer(byte_level(tmp_path))
    plain = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    found = _truncated([0, *plain, 1], plain, 4)
    assert found == [0, *plain[-2:], 1]
    # An encoding that is another with special tokens has no place for them.
    assert _truncated([5, 6, 7, 8], [1, 2, 3], 2) == [7, 8]


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"input": ""}, "input", "invalid_value", "empty"),
        ({"input": []}, "input", "invalid_value", "empty"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value", "empty"),
        ({"input": [[1], []]}, "input[1]", "invalid_value", "empty"),
        ({"input": None}, "input", "invalid_type", ""),
        ({"input": 1}, "input", "invalid_type", ""),
        ({"input": ["a", 1]}, "input[1]", "invalid_type", "a string or a list of integers"),
        ({"input": [1, "a"]}, "input[1]", "invalid_type", "integer"),
        ({"input": [[1], [1024]]}, "input[1][0]", "invalid_value", "1023"),
        ({"input": [-1]}, "input[0]", "invalid_value", "must be at least 0, got -1"),
        ({"input": ["a"] * 2049}, "input", "invalid_value", "2048"),
        ({"input": [1] * 257}, "input", "context_length_exceeded", "256 tokens. However, the input has 257"),
        ({"input": ["a", "a" * 256]}, "input", "context_length_exceeded", "257"),
        ({"dimensions": 0}, "dimensions", "invalid_value", ""),
        ({"dimensions": 17}, "dimensions", "invalid_value", "16"),
        ({"encoding_format": "hex"}, "encoding_format", "invalid_value", "supported values are 'base64', 'float'"),
        ({"pooling": "max"}, "pooling", "invalid_value", "supported values are 'last', 'mean'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value", "256"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "invalid_value", "256"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value", ""),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "invalid_value", "not supported"),
        ({"endianness": "big"}, "endianness", "invalid_value", "not supported"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_asked_of_the_engine(
    server: RunningServer, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    assert_error(embed(server, **fields), 400, INVALID, param, code, message)
    assert not server.engine.requests


def test_another_model(server: RunningServer) -> None:
    assert_error(embed(server, model="other"), 404, INVALID, "model", "model_not_found")


def test_a_full_queue_and_an_engine_that_dies(server: RunningServer) -> None:
    server.engine.submit_error = QueueFullError("the queue is full")
    reply = embed(server)
    assert_error(reply, 429, "requests", None, "rate_limit_exceeded")
    assert reply.headers["retry-after"]
    server.engine.submit_error = EngineUnavailableError("the engine has died")
    assert_error(embed(server), 503, "server_error")


def test_a_client_that_leaves_cancels_all_inputs(server: RunningServer) -> None:
    server.engine.step_seconds = 60
    body = b'{"model": "test", "input": ["a", "b"]}'
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = server.raw(f"{head}\r\n\r\n".encode() + body)
    wait_until(lambda: len(server.engine.requests) == 2)
    connection.close()
    wait_until(lambda: len(server.engine.cancelled) == 2)
    wait_until(lambda: server.context.num_running == 0)
