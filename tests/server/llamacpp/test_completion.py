"""`/completion`: replies and streams in llama.cpp's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventlm.metrics.rows import RequestRow
from eventlm.server.llamacpp.completion import llama_timings
from tests.processes import wait_until
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.sent_streams import parse


def complete(server: RunningServer, **fields: Any) -> Any:
    return server.post("/completion", {"prompt": "hi", **fields})


def end(**fields: Any) -> dict[str, Any]:
    """A whole reply to `hi`, or the end of its stream, without the settings."""
    return {
        "index": 0, "content": "Hello, world", "tokens": [], "id_slot": -1, "stop": True, "tokens_predicted": 12,
        "tokens_evaluated": 3, "model": "test", "prompt": "<|bos|>hi", "has_new_line": False, "truncated": False,
        "stop_type": "eos", "stopping_word": "", "tokens_cached": 4, **fields,
    }  # fmt: skip


def part(content: str, tokens: list[int], count: int, index: int = 0) -> dict[str, Any]:
    """A part of a stream. count: of the tokens so far."""
    return {
        "index": index, "content": content, "tokens": tokens, "id_slot": -1, "stop": False, "tokens_predicted": count,
        "tokens_evaluated": 3,
    }  # fmt: skip


def without_settings(reply: dict[str, Any]) -> dict[str, Any]:
    settings = reply.pop("generation_settings", None)
    assert (settings is not None) == reply["stop"]
    return reply


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_whole_reply(server: RunningServer, path: str) -> None:
    reply = server.post(path, {"prompt": "hi", "seed": 7}).json()
    assert reply["generation_settings"]["seed"] == 7
    assert without_settings(reply) == end()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"return_tokens": True}, {"tokens": list(b"Hello, world")}),
        ({"n_predict": 2}, {"content": "He", "tokens_predicted": 2, "stop_type": "limit"}),
        (
            {"stop": ["o,"]},
            {"content": "Hell", "tokens_predicted": 6, "stop_type": "word", "stopping_word": "o,"},
        ),
        ({"n_predict": 0}, {"content": "", "tokens_predicted": 0, "stop_type": "limit"}),
        ({"cache_prompt": False, "id_slot": 1}, {}),
    ],
)
def test_ends(server: RunningServer, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert without_settings(complete(server, **fields).json()) == end(**expected)


def test_the_end_of_the_context(server: RunningServer) -> None:
    server.engine.script_end = None
    reply = complete(server, n_predict=100_000).json()
    assert (reply["truncated"], reply["stop_type"], reply["tokens_predicted"]) == (True, "limit", 253)
    assert reply["generation_settings"]["n_predict"] == 100_000


def test_several_prompts_and_completions(server: RunningServer) -> None:
    server.engine.script = lambda request, index: [[request.prompt_token_ids[-1]], [10 if index else 48]]
    replies = complete(server, prompt=["a", "b"], n_cmpl=2).json()
    found = [(reply["index"], reply["content"], reply["prompt"], reply["has_new_line"]) for reply in replies]
    assert found == [
        (0, "a0", "<|bos|>a", False),
        (1, "a\n", "<|bos|>a", True),
        (2, "b0", "<|bos|>b", False),
        (3, "b\n", "<|bos|>b", True),
    ]


#: What the model says so many bytes a step, further fields, and the parts of the stream before its end.
STREAMS: list[tuple[str, int, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = [
    ("ab\n", 1, {}, [part("a", [97], 1), part("b", [98], 2), part("\n", [10], 3)], {"has_new_line": True}),
    ("abc", 2, {"n_predict": 3}, [part("ab", [97, 98], 2), part("c", [99], 3)], {"stop_type": "limit"}),
    # A character is sent once it is whole, its tokens as they come.
    ("é", 1, {}, [part("", [195], 1), part("é", [169], 2)], {}),
    (
        "abc",
        1,
        {"stop": "bc"},
        [part("a", [97], 1), part("", [98], 2), part("", [99], 3)],
        {"stop_type": "word", "stopping_word": "bc"},
    ),
    ("", 1, {}, [], {}),
]


@pytest.mark.parametrize(("text", "width", "fields", "parts", "last"), STREAMS)
def test_the_events_of_a_stream(
    server: RunningServer,
    text: str,
    width: int,
    fields: dict[str, Any],
    parts: list[dict[str, Any]],
    last: dict[str, Any],
) -> None:
    server.engine.script = spell(text, width=width)
    reply = complete(server, stream=True, **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    count = parts[-1]["tokens_predicted"] if parts else 0
    expected = end(content="", tokens_predicted=count, **last)
    assert [without_settings(event) for event in reply.events()] == [*parts, expected]


def test_a_stream_of_two_prompts(server: RunningServer) -> None:
    events = complete(server, stream=True, prompt=["a", "b"], n_predict=1).events()
    assert sorted((event["index"], event["stop"]) for event in events) == [(0, False), (0, True), (1, False), (1, True)]


@pytest.mark.parametrize("stream", [True, False])
def test_probabilities(server: RunningServer, stream: bool) -> None:
    reply = complete(server, n_probs=2, n_predict=1, stream=stream)
    body = reply.events()[0] if stream else reply.json()
    top = [
        {"id": token_id, "token": chr(token_id), "bytes": [token_id], "logprob": -token_id / 100}
        for token_id in (32, 33)
    ]
    own = {"id": 72, "token": "H", "bytes": [72], "logprob": -0.72}
    assert body["completion_probabilities"] == [{**own, "top_logprobs": top}]
    if stream:
        assert "completion_probabilities" not in reply.events()[-1]


def test_response_fields(server: RunningServer) -> None:
    names = ["content", "generation_settings/n_predict", "nothing", "content/x", "generation_settings/y"]
    expected = {"content": "Hell", "generation_settings/n_predict": 4}
    assert complete(server, n_predict=4, response_fields=names).json() == expected
    assert complete(server, prompt=["a", "b"], n_predict=4, response_fields=names).json() == [expected] * 2
    *parts, last = complete(server, n_predict=4, response_fields=names, stream=True).events()
    assert last == {"content": "", "generation_settings/n_predict": 4}
    assert "".join(each["content"] for each in parts) == "Hell"
    assert "stop" in complete(server, response_fields=[]).json()


def test_timings() -> None:
    row = RequestRow(
        request=0, index=0, replica=0, reason="eos", arrived_ns=0, finished_ns=9, prompt_tokens=10, output_tokens=4,
        cached_tokens=6, request_e2e_time=9, request_prefill_time=2_000_000, request_decode_time=8_000_000,
    )  # fmt: skip
    found = llama_timings(row)
    assert (found.cache_n, found.prompt_n, found.prompt_ms, found.prompt_per_token_ms) == (6, 4, 2.0, 0.5)
    assert (found.prompt_per_second, found.predicted_n, found.predicted_ms) == (2000.0, 4, 8.0)
    assert (found.predicted_per_token_ms, found.predicted_per_second) == (2.0, 500.0)


def test_an_error_amid_a_stream(server: RunningServer) -> None:
    server.engine.script_end = "error"
    *parts, last = complete(server, stream=True).events()
    assert parts
    assert last["error"]["type"] == "server_error"
    assert complete(server).status == 500


def test_a_client_that_leaves_amid_a_stream(server: RunningServer) -> None:
    server.engine.script_end, server.engine.step_seconds = None, 0.001
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = server.raw(f"{head}\r\n\r\n".encode() + body)
    connection.recv(1000)
    connection.close()
    wait_until(lambda: server.engine.cancelled)
    assert server.engine.cancelled == [(0, "client")]


def test_a_stream_can_be_resumed_by_its_request_id(start_server: Any) -> None:
    server = start_server(resume_seconds=60)
    reply = server.post("/completion", {"prompt": "hi", "stream": True, "request_id": "mine"})
    again = server.request("GET", "/v1/stream/mine")
    sent, resumed = ([json.loads(event.data) for event in parse(each.data)] for each in (reply, again))
    assert "".join(event["content"] for event in resumed) == "Hello, world"
    assert resumed[-1] == sent[-1]
    assert resumed[-1]["prompt"] == "<|bos|>hi"
