"""Servers with the official client, and lines of streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ollama
import pytest

from tests.http_exchange import Reply
from tests.server.conftest import RunningServer

MESSAGES = [{"role": "user", "content": "hi"}]
CREATED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
#: What `/api/chat` says of a stream that the engine double ends.
LAST = {"done": True, "done_reason": "stop", "prompt_eval_count": 21, "eval_count": 12}


@contextmanager
def client_of(url: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=url)
    try:
        yield client
    finally:
        client._client.close()


def lines(reply: Reply) -> list[Any]:
    """The lines of a stream, without what all have alike."""
    assert reply.status == 200, reply.data
    assert reply.headers["content-type"] == "application/x-ndjson; charset=utf-8"
    found = [json.loads(line) for line in reply.data.splitlines()]
    assert len({(line.pop("model"), line.pop("created_at")) for line in found if "model" in line}) == 1
    return found


def chat(server: RunningServer, **fields: Any) -> Reply:
    return server.post("/api/chat", {"model": "test", "messages": MESSAGES, **fields})


def generate(server: RunningServer, **fields: Any) -> Reply:
    return server.post("/api/generate", {"model": "test", "prompt": "hi", **fields})


def assert_ollama_error(reply: Reply, status: int, *words: str) -> None:
    assert reply.status == status, reply.data
    assert reply.headers["content-type"].startswith("application/json")
    body = reply.json()
    assert body.keys() == {"error"}
    assert all(word in body["error"] for word in words), body


@pytest.fixture
def start_with_ollama(start_server: Callable[..., RunningServer]) -> Iterator[Callable[..., Any]]:
    """Start servers that each have an official client."""
    opened: list[ollama.Client] = []

    def start(**settings: Any) -> tuple[RunningServer, ollama.Client]:
        server = start_server(**settings)
        server.engine.max_model_len = 4096
        opened.append(ollama.Client(host=server.url))
        return server, opened[-1]

    yield start
    for client in opened:
        client._client.close()
