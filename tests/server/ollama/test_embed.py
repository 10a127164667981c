"""`/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.server.conftest import RunningServer
from tests.server.ollama.clients import assert_ollama_error


def embed(server: RunningServer, **fields: Any) -> Any:
    return server.post("/api/embed", {"model": "test", **fields})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", [[256, 97]]), (["a", "bc"], [[256, 97], [256, 98, 99]]), (["x" * 300], [[256] + [120] * 255])],
)
def test_inputs(start_with_ollama: Any, given: Any, prompts: list[list[int]]) -> None:
    server, client = start_with_ollama()
    server.engine.max_model_len = 256
    reply = client.embed(model="test:latest", input=given)
    assert [request.prompt_token_ids for request in server.engine.requests] == prompts
    assert (reply.model, reply.prompt_eval_count) == ("test:latest", sum(map(len, prompts)))
    for prompt, vector in zip(prompts, reply.embeddings, strict=True):
        length = math.hypot(len(prompt), sum(prompt))
        assert vector[:2] == pytest.approx([len(prompt) / length, sum(prompt) / length])
        assert len(vector) == 16


def test_a_special_token_at_the_end_stays_there(server: RunningServer) -> None:
    embed(server, input="x" * 300 + "<|eos|>")
    assert server.engine.requests[0].prompt_token_ids == [256] + [120] * 254 + [257]


@pytest.mark.parametrize(("dimensions", "size"), [(None, 16), (0, 16), (3, 3), (16, 16), (4096, 16)])
def test_dimensions(server: RunningServer, dimensions: int | None, size: int) -> None:
    [vector] = embed(server, input="a", dimensions=dimensions).json()["embeddings"]
    assert len(vector) == size
    assert math.hypot(*vector) == pytest.approx(1)


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": ""}, {"input": []}])
def test_no_input(server: RunningServer, given: dict[str, Any]) -> None:
    assert embed(server, **given).json() == {"model": "test", "embeddings": []}
    assert not server.engine.requests


def test_the_older_form(start_with_ollama: Any) -> None:
    server, client = start_with_ollama()
    assert list(client.embeddings(model="test", prompt="a").embedding[:3]) == [2, 256 + 97, 0]
    assert server.post("/api/embeddings", {"model": "test", "prompt": ""}).json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/embed", {"input": "x" * 300, "truncate": False}, 400, ("context length", "input")),
        ("/api/embed", {"input": [1]}, 400, ("input[0]",)),
        ("/api/embed", {"input": 7}, 400, ("input",)),
        ("/api/embed", {"input": "a", "dimensions": -1}, 400, ("dimensions",)),
        ("/api/embed", {"input": "a", "model": "other"}, 404, ("other",)),
        ("/api/embeddings", {"prompt": "x" * 300}, 400, ("context length",)),
        ("/api/embeddings", {"prompt": ["a"]}, 400, ("prompt",)),
        ("/api/embeddings", {"prompt": "", "model": "other"}, 404, ("other",)),
    ],
)
def test_what_is_wrong(
    server: RunningServer, path: str, body: dict[str, Any], status: int, words: tuple[str, ...]
) -> None:
    assert_ollama_error(server.post(path, {"model": "test", **body}), status, *words)
