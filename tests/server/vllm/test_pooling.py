"""`/pooling`: the vectors of /v1/embeddings in vLLM's shape."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error


def test_its_vectors_are_those_of_embeddings(server: RunningServer) -> None:
    body = {"model": "test", "input": ["one", "two and more"], "dimensions": 4}
    pooled = server.post("/pooling", body).json()
    embedded = server.post("/v1/embeddings", body).json()
    assert pooled["id"].startswith("pool-")
    assert pooled.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert (pooled["object"], pooled["model"], pooled["usage"]) == ("list", "test", embedded["usage"])
    assert pooled["data"] == [
        {"index": each["index"], "object": "pooling", "data": each["embedding"]} for each in embedded["data"]
    ]


def test_in_base64(server: RunningServer) -> None:
    body = {"model": "test", "input": "one", "task": "embed"}
    [plain] = server.post("/pooling", body).json()["data"]
    [packed] = server.post("/pooling", body | {"encoding_format": "base64"}).json()["data"]
    assert struct.unpack("<16f", base64.b64decode(packed["data"])) == pytest.approx(plain["data"])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"task": "classify"}, "task", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "invalid_value"),
        ({"use_activation": False}, "use_activation", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": None}, "input", "invalid_type"),
    ],
)
def test_what_it_refuses(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    reply = server.post("/pooling", {"model": "test", "input": "x"} | fields)
    assert_error(reply, 400, INVALID, param=param, code=code)


def test_timings(server: RunningServer) -> None:
    reply = server.post("/pooling", {"model": "test", "input": "x", "eventlm": {"timings": True}})
    assert "timings" in reply.json()["eventlm"]
