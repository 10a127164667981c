"""The official client against a real server; content types, refused paths, keys and scheduling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from eventlm.config import ServiceClass
from tests.server.conftest import RunningServer
from tests.server.described import assert_idle
from tests.server.ollama.clients import MESSAGES, assert_ollama_error, chat, client_of, generate, lines
from tests.server.tool_calls import TOOLS
from tests.serving import Server, serve

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), "--model", "fake", "--max-model-len", "1024") as server:
        yield server
        assert_idle(server)


@pytest.fixture(scope="module")
def client(live: Server) -> Iterator[ollama.Client]:
    with client_of(live.url) as client:
        yield client


def test_chats_and_their_durations(client: ollama.Client) -> None:
    fields: Any = {"model": "fake", "messages": MESSAGES, "options": {"seed": 1, "num_predict": 8}}
    whole = client.chat(**fields)
    *parts, last = list(client.chat(**fields, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    for reply in (whole, last):
        assert (reply.done, reply.done_reason, reply.eval_count, reply.prompt_eval_count) == (True, "length", 8, 21)
        assert reply.load_duration == 0
        assert reply.prompt_eval_duration > 0
        assert reply.eval_duration > 0
        assert reply.total_duration > reply.prompt_eval_duration + reply.eval_duration


def test_a_structure(client: ollama.Client) -> None:
    options = {"num_predict": 200, "seed": 3}
    said = client.chat(model="fake", messages=MESSAGES, format=SCHEMA, options=options).message.content
    assert set(json.loads(said or "")) == {"a"}
    said = client.generate(model="fake", prompt="hi", format=SCHEMA, options=options).response
    assert set(json.loads(said)) == {"a"}


def test_a_function_as_a_tool(client: ollama.Client) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    reply = client.chat(model="fake", messages=MESSAGES, tools=[add], options={"num_predict": 4})
    assert reply.message.role == "assistant"


def test_embeddings_and_models(client: ollama.Client) -> None:
    reply = client.embed(model="fake", input=["a", "b"])
    assert len(reply.embeddings) == 2
    assert reply.total_duration > 0
    assert client.list().models[0].model == client.ps().models[0].model == "fake:latest"
    assert client.show("fake").capabilities == ["completion", "embedding", "tools"]


@pytest.mark.parametrize(
    "refused",
    [
        lambda client: client.pull("llama3"),
        lambda client: client.push("llama3"),
        lambda client: client.create(model="a", from_="b"),
        lambda client: client.copy("fake", "b"),
        lambda client: client.delete("fake"),
    ],
)
def test_models_are_not_changed(client: ollama.Client, refused: Any) -> None:
    with pytest.raises(ollama.ResponseError, match=r"/api/\w+ is not supported: this server runs the model") as raised:
        refused(client)
    assert raised.value.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/blobs/sha256:00", 404),
        ("POST", "/api/me", 404),
        ("POST", "/api/nowhere", 404),
        ("GET", "/api/chat", 405),
        ("DELETE", "/api/tags", 405),
    ],
)
def test_other_paths_and_methods(server: RunningServer, method: str, path: str, status: int) -> None:
    assert_ollama_error(server.request(method, path), status, path)


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", ["/api/chat", "/api/show"])
def test_any_content_type_unless_a_web_page_sends_it(
    server: RunningServer, path: str, content_type: str | None
) -> None:
    body = json.dumps({"model": "test", "messages": MESSAGES, "stream": False}).encode()
    headers = {"Content-Type": content_type} if content_type else {}
    assert server.request("POST", path, body, headers).status == 200
    page = {"Origin": "https://example.com"}
    assert_ollama_error(server.request("POST", path, body, headers | page), 403, "--cors-origin")
    assert server.request("POST", path, body, {"Content-Type": "application/json"} | page).status == 200


def test_other_apis_still_want_json(server: RunningServer) -> None:
    assert server.request("POST", "/v1/completions", b'{"model": "test", "prompt": "a"}').status == 415


def test_clients_look_whether_it_is_running(server: RunningServer) -> None:
    assert server.request("HEAD", "/").status == 200
    assert server.request("HEAD", "/api/tags").status == 200


def test_scheduling_and_ids(start_server: Any) -> None:
    server = start_server({"gold": ServiceClass(priority=-5)})
    for ask in (chat, generate):
        reply = ask(server, stream=False, service_tier="gold", deadline_ms=5000, request_id="mine")
        assert reply.headers["x-request-id"] == "mine"
        scheduling = server.engine.requests[-1].scheduling
        assert (scheduling.service_class, scheduling.priority, scheduling.deadline_ns) == ("gold", -5, 5 * 10**9)
    assert_ollama_error(chat(server, drop_if_late=True), 400, "drop_if_late")


def test_a_key_and_its_limits(start_server: Any) -> None:
    server = start_server(api_key="secret")
    assert_ollama_error(chat(server), 401, "API key")
    reply = server.post("/api/chat", {"model": "test", "messages": MESSAGES}, {"Authorization": "Bearer secret"})
    assert lines(reply)[-1]["done"]


def test_a_server_that_loads(server: RunningServer) -> None:
    server.engine.state = "loading"
    reply = chat(server, tools=TOOLS)
    assert_ollama_error(reply, 503, "loading")
    assert reply.headers["retry-after"]
