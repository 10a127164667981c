"""The client against servers of every kind, and against a real one."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from eventlm.client.errors import ClientError
from eventlm.client.openai_client import OpenAIClient, base_url
from eventlm.client.sse import StreamDelta
from eventlm.errors import UsageError
from tests.cli.conftest import StartServer
from tests.cli.conftest import start_server as start_server
from tests.client.scripted import Handler, replying, scripted_server, streaming
from tests.serving import fake_text

BODY = {"model": "m", "prompt": "hi", "max_tokens": 4}


def chunk(text: str, *, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}).encode() + b"\n\n"


async def completion(handler: Handler, *, chat: bool = False, **settings: Any) -> list[StreamDelta]:
    async with scripted_server(handler) as url, OpenAIClient(url, **settings) as client:
        stream = client.stream_chat(BODY) if chat else client.stream_completion(BODY)
        return [delta async for delta in stream]


async def failure(handler: Handler, **settings: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        await completion(handler, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("http://h/openai/v1", "http://h/openai/v1"),
        ("https://h/api/v3", "https://h/api/v3"),
    ],
)
def test_base_url(given: str, expected: str) -> None:
    assert base_url(given) == expected


@pytest.mark.parametrize(
    "given", ["", "http://", "ftp://h", "http://h:x", "http://h:0", "http://h:99999", "file:///etc"]
)
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        base_url(given)


async def test_completion() -> None:
    deltas = await completion(
        streaming(
            chunk("Hel", usage=None),
            chunk("lo", index=1) + chunk("", finish="length"),
            b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n',
            b"data: [DONE]\n\n",
        )
    )
    assert [(delta.choice, delta.text, delta.finish_reason) for delta in deltas] == [
        (0, "Hel", None),
        (1, "lo", None),
        (0, "", "length"),
        (0, "", None),
    ]
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)
    times = [delta.received_ns for delta in deltas]
    assert times == sorted(times)
    assert times[0] > 0


async def test_chat() -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"content": None, "reasoning_content": "hm"}}]},
        {"choices": [{"index": 0, "delta": {"content": "Hé"}, "logprobs": None}], "usage": None},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 1}},
    ]
    data = b"".join(b"data:" + json.dumps(each).encode() + b"\r\n\r\n" for each in chunks) + b"data:[DONE]\r\n\r\n"
    deltas = await completion(streaming(*(data[index : index + 7] for index in range(0, len(data), 7))), chat=True)
    assert "".join(delta.text for delta in deltas) == "Hé"
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert deltas[-1].finish_reason == "stop"


async def test_a_stream_without_done_is_whole_if_it_has_a_finish_reason() -> None:
    deltas = await completion(streaming(chunk("a"), chunk("b", finish="stop").rstrip()))
    assert [delta.text for delta in deltas] == ["a", "b"]


async def test_the_body_arrives() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.method, request.path, await request.json(), request.headers["Authorization"]))
        return await streaming(chunk("a", finish="stop"), b"data: [DONE]\n\n")(request)

    await completion(handler, api_key="secret")
    assert seen == [("POST", "/v1/completions", BODY | {"stream": True}, "Bearer secret")]


async def test_a_connection_is_used_again() -> None:
    peers: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return await streaming(chunk("a", finish="stop"), b"data: [DONE]\n\n")(request)

    async with scripted_server(handler) as url, OpenAIClient(url) as client:
        for _ in range(3):
            assert [delta.text async for delta in client.stream_completion(BODY)] == ["a"]
    assert len(set(peers)) == 1


async def test_leaving_closes_the_connection() -> None:
    left = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(chunk("a"))
                await asyncio.sleep(0.001)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
            raise

    async with scripted_server(handler) as url, OpenAIClient(url) as client:
        async with aclosing(client.stream_completion(BODY)) as stream:  # type: ignore[type-var]
            await anext(stream)
        await asyncio.wait_for(left.wait(), 30)


@pytest.mark.parametrize(
    ("status", "body", "content_type", "kind", "words"),
    [
        (400, '{"error":{"message":"too\\nlong","code":null}}', "application/json", "http", "HTTP 400: too long"),
        (400, '{"object":"error","message":"of vLLM"}', "application/json", "http", "HTTP 400: of vLLM"),
        (422, '{"detail":[{"msg":"field required"}]}', "application/json", "http", "field required"),
        (404, '{"error":"model not found"}', "application/json", "http", "model not found"),
        (
            401,
            '{"error":{"message":"No."}}',
            "application/json",
            "http",
            "401: No; give an API key in EVENTLM_API_KEY",
        ),
        (404, "<html>no</html>", "text/html", "protocol", "is it the address of an OpenAI-compatible server"),
        (404, "", "text/plain", "protocol", "is it the address of an OpenAI-compatible server"),
        (502, "<html>no</html>", "text/html", "http", "HTTP 502: Bad Gateway"),
        (200, "<html>hi</html>", "text/html", "protocol", "did not answer with a stream of events"),
        (200, '{"error":{"message":"bad"}}', "application/json", "server", "bad"),
        (200, '{"choices":[{"text":"x"}]}', "application/json", "protocol", "did not answer with a stream of events"),
    ],
)
async def test_bad_replies(status: int, body: str, content_type: str, kind: str, words: str) -> None:
    error = await failure(replying(status, body, content_type))
    assert (error.kind, error.status) == (kind, status if status != 200 else None)
    assert words in str(error)


async def test_a_key_that_is_refused() -> None:
    error = await failure(replying(401, '{"error":{"message":"No."}}', "application/json"), api_key="wrong")
    assert str(error).endswith(" answered HTTP 401: No; is the API key right?")


async def test_an_error_within_a_stream() -> None:
    error = await failure(
        streaming(chunk("a"), b'data: {"error":{"message":"out of memory","code":500}}\n\n', b"data: [DONE]\n\n")
    )
    assert (error.kind, error.status) == ("server", None)
    assert "out of memory" in str(error)


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data: [DONE]"])
async def test_a_stream_that_is_done_before_it_begins(end: bytes) -> None:
    error = await failure(streaming(end))
    assert (error.kind, error.status) == ("broken", None)
    assert "/v1/completions ended its stream before any output" in str(error)
    # There are servers that give no reason for the end of a text.
    assert [delta.text for delta in await completion(streaming(chunk("a"), end))] == ["a"]


async def test_redirects_without_an_end() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/v1/completions")

    error = await failure(handler)
    assert error.kind == "protocol"
    assert "redirects in a circle" in str(error)


@pytest.mark.parametrize("abort", [True, False])
async def test_a_stream_that_breaks_off(abort: bool) -> None:
    error = await failure(streaming(chunk("a"), chunk("b"), abort=abort))
    assert error.kind == "broken"
    assert ("without a finish reason" in str(error)) != abort


async def test_an_event_that_is_no_chunk() -> None:
    assert (await failure(streaming(b"data: {broken\n\n"))).kind == "protocol"
    assert (await failure(streaming(b'data: {"choices":[{"text":7}]}\n\n'))).kind == "protocol"
    assert (await failure(streaming(b"data: \xff\n\n"))).kind == "protocol"


async def test_silence() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    error = await failure(handler, timeout_seconds=0.5)
    assert error.kind == "timeout"
    assert "sent nothing for 0.5 s" in str(error)


async def test_an_unreachable_server() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        async with OpenAIClient(f"http://127.0.0.1:{bound.getsockname()[1]}") as client:
            with pytest.raises(
                ClientError, match=r"cannot connect to .*: Connection refused; is the server run"
            ) as caught:
                await client.models()
    assert caught.value.kind == "connection"


@pytest.mark.parametrize(("answer", "kind"), [(b"220 mail ready\r\n", "protocol"), (b"", "broken")])
async def test_what_is_not_http(answer: bytes, kind: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server, OpenAIClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(ClientError) as caught:
            await client.models()
    assert caught.value.kind == kind


async def test_models() -> None:
    body = '{"object":"list","data":[{"id":"a","object":"model","max_model_len":9},{"id":"b"}],"models":[]}'
    async with scripted_server(replying(200, body)) as url, OpenAIClient(url) as client:
        assert await client.models() == ["a", "b"]


@pytest.mark.parametrize("body", ["[]", "{}", "<html>", '{"data":[{"name":"x"}]}'])
async def test_models_of_something_else(body: str) -> None:
    async with scripted_server(replying(200, body)) as url, OpenAIClient(url) as client:
        with pytest.raises(ClientError, match="did not answer with a list of models"):
            await client.models()


class TestRealServer:
    @pytest.fixture
    def url(self, start_server: StartServer) -> str:
        return start_server("--model", "fake").url

    async def test_streams(self, url: str) -> None:
        async with OpenAIClient(url) as client:
            assert await client.models() == ["fake"]
            body = BODY | {"model": "fake", "seed": 7, "max_tokens": 20, "ignore_eos": True}
            body["stream_options"] = {"include_usage": True}
            deltas = [delta async for delta in client.stream_completion(body)]
            assert "".join(delta.text for delta in deltas) == fake_text(7, 20)
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
            assert deltas[-1].usage is not None
            assert deltas[-1].usage.completion_tokens == 20
            messages = {"messages": [{"role": "user", "content": "hi"}]}
            chat = [delta async for delta in client.stream_chat(body | messages)]
            assert chat[0].text == ""
            assert chat[-2].finish_reason == "length"
            with pytest.raises(ClientError, match="The model 'other' does not exist") as caught:
                await anext(aiter(client.stream_completion(body | {"model": "other"})))
            assert (caught.value.kind, caught.value.status) == ("http", 404)
