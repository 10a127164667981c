"""Requests that come several times with the same `Idempotency-Key`: one runs, and all get its reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eventlm.engine.request import EngineUnavailableError, QueueFullError
from tests.http_exchange import Reply
from tests.processes import wait_until
from tests.server.auth.test_api_keys import write
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs
from tests.server.engine_double import spell
from tests.server.sent_streams import joined, parse, reply_id_of, resume
from tests.server.tool_calls import CALL, TOOLS

HEADER = "Idempotency-Key"
KEY = {HEADER: 'a-secret/"key"'}
CHAT = {"model": "test", "messages": [{"role": "user", "content": "hi"}]}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 3, "stop": ["wor"], "timings": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 3, "stop": ["wor"], "stream": True, "stream_options": USAGE}),
    ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]] * 2}),
    ("/v1/completions", {"model": "test", "prompt": ["hi", "ho"], "echo": True, "logprobs": 1}),
    ("/v1/completions", {"model": "test", "prompt": ["hi", "ho"], "echo": True, "logprobs": 1, "stream": True}),
    ("/v1/embeddings", {"model": "test", "input": ["hi", "ho"]}),
    ("/v1/responses", {"model": "test", "input": "hi"}),
    ("/v1/responses", {"model": "test", "input": "hi", "stream": True}),
    ("/v1/responses", {"model": "test", "input": "hi", "background": True}),
    ("/v1/responses", {"model": "test", "input": "hi", "background": True, "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 50}),
    ("/v1/messages", {**CHAT, "max_tokens": 50, "stream": True}),
    ("/api/chat", CHAT),
    ("/completion", {"prompt": "hi", "stream": True}),
    ("/invocations", CHAT),
]


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@contextmanager
def held(server: RunningServer, *, after: int = 3) -> Iterator[None]:
    """Generations stop after so many tokens until the end of the block."""
    server.engine.most_said = server.engine.num_said + after
    yield
    server.engine.most_said = float("inf")


def num_readers(server: RunningServer) -> int:
    return sum(len(reply.readers) for reply in server.engine.registry._replies.values())


def send(server: RunningServer, path: str, body: dict[str, Any]) -> Reply:
    return server.post(path, body, KEY)


@pytest.mark.parametrize(("path", "body"), CASES)
def test_all_get_the_same_bytes_at_once_and_later(
    server: RunningServer, threads: ThreadPoolExecutor, path: str, body: dict[str, Any]
) -> None:
    server.engine.submit_seconds = 0.01
    with held(server):
        futures = [threads.submit(send, server, path, body) for _ in range(3)]
        wait_until(lambda: server.engine.requests)
        futures.append(threads.submit(send, server, path, body))
    replies = [future.result() for future in futures]
    num_requests = len(server.engine.requests)
    replies.append(send(server, path, body))
    assert {reply.status for reply in replies} == {200}
    assert {reply.data for reply in replies} == {replies[0].data}
    assert len({reply.headers["x-request-id"] for reply in replies}) == 5
    assert len(server.engine.requests) == num_requests
    assert server.post(path, body, {HEADER: "another"}).status == 200
    assert len(server.engine.requests) == 2 * num_requests
    wait_until(lambda: server.context.num_running == 0 and num_readers(server) == 0)


def test_tool_calls_have_the_same_ids(start_with_client: Any) -> None:
    server, client = start_with_client(tool_parser="hermes")
    server.engine.script = spell(CALL * 2, width=3)
    fields: dict[str, Any] = {**CHAT, "tools": TOOLS, "extra_headers": KEY}
    first, again = (client.chat.completions.create(**fields) for _ in range(2))
    assert [call.function.name for call in first.choices[0].message.tool_calls] == ["get_weather"] * 2
    assert first == again
    fields["extra_headers"] = {HEADER: "of-a-stream"}
    chunks, chunks_again = (list(client.chat.completions.create(**fields, stream=True)) for _ in range(2))
    assert chunks == chunks_again
    assert len(server.engine.requests) == 2


def test_a_client_that_retries_joins_what_it_began(start_with_client: Any) -> None:
    server, client = start_with_client()
    server.engine.step_seconds = 0.03
    impatient = client.with_options(timeout=0.15, max_retries=10)
    found = impatient.chat.completions.create(**CHAT, extra_headers=KEY)
    assert found.choices[0].message.content == "Hello, world"
    assert (len(server.engine.requests), server.engine.cancelled) == (1, [])
    assert client.chat.completions.create(**CHAT, extra_headers=KEY) == found


def test_a_stream_that_broke_begins_anew_and_can_be_resumed(server: RunningServer) -> None:
    body = {**CHAT, "stream": True}
    data = json.dumps(body).encode()
    with held(server, after=5):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{HEADER}: k\r\n"
        connection = server.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: b"Hello"[4:] in connection.recv(1 << 16))
        connection.close()
    whole = server.post("/v1/chat/completions", body, {HEADER: "k"}).data
    events = parse(whole)
    assert joined(events)[0][0]["text"] == "Hello, world"
    for index in (0, 3, len(events) - 2):
        rest = resume(server, reply_id_of(whole), events[index].id)
        assert parse(rest.data) == events[index + 1 :]
    assert len(server.engine.requests) == 1


def test_a_reader_by_the_id_joins_too(server: RunningServer, threads: ThreadPoolExecutor) -> None:
    with held(server):
        first: Future[Reply] = threads.submit(send, server, "/v1/chat/completions", {**CHAT, "stream": True})
        [reply_id] = wait_until(lambda: list(server.engine.registry._replies))
        second = threads.submit(resume, server, reply_id)
        # The edge, its client and the other one.
        wait_until(lambda: num_readers(server) == 3)
    assert first.result().data == second.result().data


def test_what_is_no_stream_is_not_read_as_one(server: RunningServer) -> None:
    for path, body in (("/v1/embeddings", {"model": "test", "input": "hi"}), ("/v1/chat/completions", CHAT)):
        assert send(server, path, body).status == 200
        [reply_id] = server.engine.registry._by_key.values()
        assert resume(server, reply_id.submission.reply_id).status == 404
        server.engine.registry.drop(reply_id)
    wait_until(lambda: num_readers(server) == 0)


@pytest.mark.parametrize("key", ["", "a b", "é", "a" * 256, "tab\there"])
def test_a_bad_key_is_refused(server: RunningServer, key: str) -> None:
    reply = server.post("/v1/completions", {"model": "test", "prompt": "hi"}, {HEADER: key})
    assert_error(reply, 400, INVALID, HEADER, "invalid_value", message="1 to 255 visible ASCII characters")
    assert server.engine.requests == []


def test_two_keys_are_refused(server: RunningServer) -> None:
    data = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{HEADER}: k\r\n"
    connection = server.raw(f"{head}{HEADER}: k\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    assert b" 400 " in connection.recv(1 << 16)
    connection.close()


def test_a_key_is_for_one_request(server: RunningServer) -> None:
    path = "/v1/chat/completions"
    reordered = b'{ "messages":[{"content":"hi","role":"user"}],  "model" : "test"}'
    assert send(server, path, CHAT).data == server.post(path, reordered, KEY).data
    for other_path, body in (
        (path, {**CHAT, "stream": True}),
        (path, {**CHAT, "unknown": 1}),
        (path, {**CHAT, "temperature": 0}),
        ("/v1/completions", {"model": "test", "prompt": "hi"}),
        ("/invocations", CHAT),
    ):
        reply = send(server, other_path, body)
        assert_error(reply, 422, INVALID, HEADER, "idempotency_key_reused", message="send the same body to the same")
    error = server.post("/v1/messages", {**CHAT, "max_tokens": 5}, KEY)
    assert (error.status, error.json()["error"]["type"]) == (422, INVALID)
    assert len(server.engine.requests) == 1


def test_keys_belong_to_their_owners(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    keys = write(
        tmp_path / "keys.toml", "".join(f'[[keys]]\nname = "{name}"\nkey = "{name}"\n' for name in ("one", "two"))
    )
    server = start_server(api_keys_file=str(keys))
    ids = {
        key: [
            server.post("/v1/chat/completions", CHAT, {**KEY, "Authorization": f"Bearer {key}"}).json()["id"]
            for _ in range(2)
        ]
        for key in ("one", "two")
    }
    assert len(server.engine.requests) == 2
    assert ids["one"][0] == ids["one"][1] != ids["two"][0] == ids["two"][1]


def test_who_was_refused_has_not_taken_the_key(server: RunningServer) -> None:
    for error, status in ((QueueFullError("full"), 429), (EngineUnavailableError("away"), 503)):
        server.engine.submit_error = error
        assert send(server, "/v1/chat/completions", {**CHAT, "user": "another"}).status == status
    server.engine.submit_error = None
    assert send(server, "/v1/chat/completions", {**CHAT, "max_tokens": 100_000}).status == 400
    assert send(server, "/v1/chat/completions", CHAT).status == 200
    wait_until(lambda: server.context.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_after_a_failure_it_runs_again(server: RunningServer, stream: bool) -> None:
    server.engine.script_end = "error"
    body = {**CHAT, "stream": stream}
    failed = send(server, "/v1/chat/completions", body)
    assert b"server_error" in failed.data
    server.engine.script_end = "eos"
    assert b'"stop"' in send(server, "/v1/chat/completions", body).data
    assert len(server.engine.requests) == 2


def test_who_leaves_may_come_back_for_a_while(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=1)
    server.engine.script_end = None
    server.engine.step_seconds = 0.01
    data = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{HEADER}: k\r\n"
    server.engine.submit_seconds = 0.05
    connection = server.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    wait_until(lambda: server.engine.num_groups)
    # Its reply goes on although it leaves before the request was admitted.
    connection.close()
    wait_until(lambda: server.engine.num_said > 10)
    assert server.engine.cancelled == []
    wait_until(lambda: server.engine.cancelled == [(0, "client")])
    wait_until(lambda: server.context.num_running == 0)
    server.engine.script_end = "eos"
    assert server.post("/v1/chat/completions", CHAT, {HEADER: "k"}).status == 200
    assert len(server.engine.requests) == 2


def test_a_delete_ends_all_readers_and_frees_the_key(server: RunningServer, threads: ThreadPoolExecutor) -> None:
    with held(server):
        futures = [threads.submit(send, server, "/v1/chat/completions", CHAT) for _ in range(3)]
        [reply_id] = wait_until(lambda: list(server.engine.registry._replies))
        wait_until(lambda: num_readers(server) == 3)
        assert server.request("DELETE", f"/v1/stream/{reply_id}").json()["cancelled"]
    assert {future.result().status for future in futures} == {499}
    assert send(server, "/v1/chat/completions", CHAT).status == 200
    assert server.request("DELETE", f"/v1/stream/{list(server.engine.registry._replies)[-1]}").status == 200
    assert send(server, "/v1/chat/completions", CHAT).status == 200
    assert len(server.engine.requests) == 3


def test_what_is_too_large_to_keep(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_memory="4KiB", resume_seconds=5)
    body = {**CHAT, "user": "u" * 5000}
    assert send(server, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "Hello, world"
    assert_error(
        send(server, "/v1/chat/completions", {**body, "stream": True}), 503, "server_error", message="no room to keep"
    )
    wait_until(lambda: server.context.num_running == 0)
    # One whose outputs do not fit goes on for its readers.
    server.engine.script = spell("Hello, world" * 10)
    text = joined(parse(send(server, "/v1/chat/completions", {**CHAT, "stream": True}).data))[0][0]["text"]
    assert text == "Hello, world" * 10


def test_a_turn_of_a_conversation_is_taken_once(start_with_client: Any) -> None:
    _, client = start_with_client()
    conversation = client.conversations.create()
    fields: dict[str, Any] = {"model": "test", "input": "hi", "conversation": conversation.id, "extra_headers": KEY}
    first, again = (client.responses.create(**fields) for _ in range(2))
    assert first == again
    assert len(client.conversations.items.list(conversation.id).data) == 2
    # A client that has the end of a response can go on with it.
    events = list(client.responses.create(model="test", input="hi", stream=True, extra_headers={HEADER: "of-a-stream"}))
    last = events[-1].response
    assert client.responses.create(model="test", input="Go on.", previous_response_id=last.id).status == "completed"


def test_a_search_has_no_key(server: RunningServer) -> None:
    body = {"model": "test", "prompt": "hi", "use_beam_search": True, "n": 2}
    assert_error(
        send(server, "/v1/completions", body), 400, INVALID, HEADER, "invalid_value", "not available with beam search"
    )


def test_keys_are_not_logged(server: RunningServer) -> None:
    with capture_logs() as logs:
        assert send(server, "/v1/chat/completions", {**CHAT, "stream": True}).status == 200
        assert send(server, "/v1/completions", {"model": "test", "prompt": "hi"}).status == 422
        wait_until(lambda: len(logs) >= 3)
    assert [line["event"] for line in logs].count("request") == 2
    assert "secret" not in repr(logs)


def test_a_server_that_stops_ends_all_readers(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(drain_seconds=0)
    with ThreadPoolExecutor(2) as pool, held(server):
        futures = [pool.submit(send, server, "/v1/chat/completions", CHAT) for _ in range(2)]
        wait_until(lambda: num_readers(server) == 2)
        server.call(server.context.drain(asyncio.Event()))
        assert {future.result().status for future in futures} == {503}
    assert server.context.num_running == 0
