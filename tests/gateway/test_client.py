"""The client of a backend against stand-ins of every kind, over real sockets."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, BackendError, BackendLoad, CallPart
from eventlm.errors import UsageError
from eventlm.gateway.client import HttpBackend
from tests.client.scripted import Handler, replying, scripted_server, streaming
from tests.gateway.requests import CHAT, COMPLETION, answer, attempt, failure, forwarded
from tests.gateway.stub_backend import FIRST_TOKEN_ID, StubBackend, chat_prompt, reply_text
from tests.gateway.stub_faults import Fault
from tests.processes import until
from tests.server.http.test_tls import make_certificate

KEY = "sk-very-secret"


@asynccontextmanager
async def connected(url: str, **spec: Any) -> AsyncIterator[HttpBackend]:
    client = HttpBackend(BackendSpec(url=url, **spec))
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def asked(stub: StubBackend, **spec: Any) -> AsyncIterator[HttpBackend]:
    async with stub, connected(stub.url, **spec) as client:
        await client.ask()
        yield client


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "ollama", "openai", "eventlm"])
async def test_chats_and_completions_of_every_kind(kind: Any) -> None:
    stub = StubBackend(kind, num_tokens=20, cache_blocks=64)
    async with asked(stub) as client:
        messages = [{"role": "user", "content": "hello" * 50}]
        text, deltas, ended = await answer(client, {"messages": messages, "temperature": 0.5})
        assert text == reply_text(chat_prompt(messages), 7, 20)
        assert sum(delta.num_tokens for delta in deltas) == 20
        assert ended == AnswerEnd("stop", AnswerUsage(prompt=64, completion=20, cached=0))
        [received] = stub.requests
        assert received.headers["x-request-id"] == "req-1"
        assert (received.body["model"], received.body["n"], received.body["seed"]) == ("stub", 1, 7)
        assert received.body["temperature"] == 0.5
        options = received.body["stream_options"]
        assert options == {"include_usage": True} | (
            {"continuous_usage_stats": True} if kind in ("vllm", "sglang", "eventlm") else {}
        )
        _, _, ended = await answer(client, {"messages": messages})
        assert ended.usage.cached == 64

        text, _, ended = await answer(client, {"prompt": "hello", "max_tokens": 5}, seed=8)
        assert (text, ended.reason) == (reply_text("hello", 8, 5), "length")
        assert (await client.read_load() is None) == (kind in ("ollama", "openai"))


async def test_an_empty_body_has_what_each_attempt_sets() -> None:
    bodies = []

    async def handler(request: Any) -> Any:
        bodies.append(await request.json())
        return await streaming(_COMPLETION_END)(request)

    one = attempt(COMPLETION)
    one = structs.replace(one, request=structs.replace(one.request, body=b" { } "))
    async with scripted_server(handler) as url, connected(url, model="m") as client:
        assert [item async for item in client.forward(one)][-1] == AnswerEnd("stop")
    assert bodies[0].keys() == {"model", "n", "seed", "stream", "stream_options"}


async def test_reasoning_calls_and_token_ids() -> None:
    stub = StubBackend(reasoning="hm", calls=[("look", '{"at": 1}')], num_tokens=3)
    async with asked(stub) as client:
        _, deltas, ended = await answer(client, CHAT | {"return_token_ids": True})
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert [call for delta in deltas for call in delta.calls] == [CallPart(0, "look", ""), CallPart(0, "", '{"at": 1}')]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert len(ids) == 3
    assert all(token_id >= FIRST_TOKEN_ID for token_id in ids)
    assert ended.reason == "tool_calls"


@pytest.mark.parametrize("kind", ["openai", "ollama"])
async def test_embeddings_in_base64_or_as_numbers(kind: Any) -> None:
    stub = StubBackend(kind)
    async with asked(stub) as client:
        [delta, ended] = [item async for item in client.forward(attempt({"input": "x", "dimensions": 32}))]
    assert isinstance(delta, AnswerDelta)
    assert len(struct.unpack("<32f", delta.embedding)) == 32
    assert ended == AnswerEnd("complete", AnswerUsage(prompt=3))
    assert stub.requests[0].body == {
        "input": "x", "dimensions": 32, "model": "stub", "encoding_format": "base64",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "refused"), (404, "refused"), (413, "refused"), (422, "refused"), (501, "refused"),
        (408, "server"), (409, "server"), (403, "server"), (500, "server"), (502, "server"),
        (425, "overloaded"), (429, "overloaded"), (503, "overloaded"), (307, "protocol"),
    ],
)  # fmt: skip
async def test_statuses(status: int, kind: str) -> None:
    async with asked(StubBackend(faults=[Fault("status", status=status, retry_after="1.5")])) as client:
        error, _ = await failure(client, CHAT)
    assert (error.kind, error.status, error.retry_after_ns) == (kind, status, 1_500_000_000)
    assert ("127.0.0.1" in str(error)) == (kind != "refused")


async def test_retry_after_as_a_date() -> None:
    until_ = format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100), usegmt=True)
    async with asked(StubBackend(faults=[Fault("status", status=429, retry_after=until_)])) as client:
        error, _ = await failure(client, CHAT)
    assert 90e9 < error.retry_after_ns < 110e9


async def test_a_refusal_has_the_backends_own_words() -> None:
    body = '{"error": {"message": "temperature must be\\n>= 0", "param": "temperature", "code": "invalid_value"}}'
    async with asked(StubBackend(faults=[Fault("status", status=400, body=body)])) as client:
        error, _ = await failure(client, CHAT)
    assert (str(error), error.param, error.code) == ("temperature must be >= 0", "temperature", "invalid_value")


async def test_a_model_that_is_gone_is_not_the_clients_fault() -> None:
    body = '{"error": {"message": "The model `stub` does not exist.", "param": "model", "code": 404}}'
    async with asked(StubBackend(faults=[Fault("status", status=404, body=body)])) as client:
        error, _ = await failure(client, CHAT)
    assert error.kind == "server"


@pytest.mark.parametrize(
    ("fault", "kind"), [("cut", "broken"), ("end", "broken"), ("malformed", "protocol"), ("error", "server")]
)
async def test_a_stream_that_goes_wrong_shows_what_came_before(fault: Any, kind: str) -> None:
    async with asked(StubBackend(faults=[Fault(fault, after=3)])) as client:
        error, text = await failure(client, COMPLETION)
    assert (error.kind, text) == (kind, reply_text("hello", 7, 3))


async def test_silence_before_and_after_the_first_delta() -> None:
    stub = StubBackend(faults=[Fault("hang", numbers=(1,)), Fault("stall", numbers=(2, 3), after=2)])
    async with asked(stub) as client:
        error, _ = await failure(client, COMPLETION, first_seconds=0.1)
        assert (error.kind, "0.1 s" in str(error)) == ("timeout", True)
        error, text = await failure(client, COMPLETION, silence_seconds=0.1)
        assert (error.kind, text) == ("timeout", reply_text("hello", 7, 2))
        # The opening of a chat is no output.
        stub.faults = [Fault("stall")]
        error, _ = await failure(client, CHAT, first_seconds=0.1)
        assert error.kind == "timeout"
        await until(lambda: stub.num_cancelled == 3)


async def test_comments_are_silence() -> None:
    async def keep_open(request: Any) -> Any:
        return await streaming(*[b": ping\n\n"] * 100_000)(request)

    async with scripted_server(keep_open) as url, connected(url, model="m") as client:
        error, _ = await failure(client, CHAT, first_seconds=0.1)
    assert error.kind == "timeout"


async def test_closing_the_iterator_ends_the_request_there() -> None:
    stub = StubBackend(num_tokens=1000, token_delay=0.01)
    async with asked(stub) as client:
        async with aclosing(client.forward(attempt(CHAT))) as items:
            await anext(items)
            assert stub.num_running == 1
        await until(lambda: stub.num_running == 0)
        assert stub.num_cancelled == 1


async def test_connections_are_kept_and_a_stale_one_is_no_failure() -> None:
    num_connections = 0
    connections: list[Any] = []

    async def close_after(request: Any) -> Any:
        nonlocal num_connections
        if request.transport not in connections:
            connections.append(request.transport)
            num_connections += 1
        elif num_connections == 1:
            # Closed while the second request was on its way.
            request.transport.abort()
            return replying(500, "")
        return await streaming(_COMPLETION_END)(request)

    async with scripted_server(close_after) as url, connected(url, model="m") as client:
        for _ in range(3):
            await answer(client, COMPLETION)
    assert num_connections == 2


async def test_the_connection_of_an_answer_is_kept_though_its_reply_ends_later() -> None:
    connections = set()
    may_end = asyncio.Event()

    async def handler(request: Any) -> Any:
        connections.add(request.transport)
        response = await streaming(_COMPLETION_END)(request)
        await may_end.wait()
        return response

    async with scripted_server(handler) as url, connected(url, model="m") as client:
        for _ in range(3):
            async with aclosing(client.forward(attempt(COMPLETION))) as items:
                assert [await anext(items), await anext(items)][1] == AnswerEnd("stop")
            may_end.set()
            # The end of the reply arrives in this very loop.
            await asyncio.sleep(0.05)
            may_end.clear()
    assert len(connections) == 1


async def test_a_new_connection_that_is_closed_is_a_failure() -> None:
    num_requests = 0

    async def close(request: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        request.transport.abort()

    async with scripted_server(close) as url, connected(url, model="m") as client:
        error, _ = await failure(client, COMPLETION)
    assert (error.kind, num_requests) == ("broken", 1)


_COMPLETION_END = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("status", [200, 400, 429])
async def test_endless_bodies(status: int) -> None:
    """Of an error the status still counts."""
    async with scripted_server(_endless(b"x", status=status)) as url, connected(url, model="m") as client:
        for request in (CHAT, {"input": "x"}):
            error, _ = await failure(client, request)
            assert error.kind == {200: "protocol", 400: "refused", 429: "overloaded"}[status]
            assert len(str(error)) < 1000
        with pytest.raises(BackendError, match="more than 16 MiB" if status == 200 else "xxx…$"):
            await client.ask()


@pytest.mark.parametrize("endless", [b"x", b"data: xxxxxxxxxxxxxxxxxxxxxxxxxxx\n"])
async def test_an_event_without_an_end(endless: bytes) -> None:
    """What came before is shown."""
    start = b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: '
    handler = _endless(endless, start=start, content_type="text/event-stream")
    async with scripted_server(handler) as url, connected(url, model="m") as client:
        error, text = await failure(client, COMPLETION)
    assert (error.kind, text) == ("protocol", "a")
    assert "sent an event of more than 16 MiB" in str(error)


async def test_nothing_is_kept_of_what_comes_behind_an_answer() -> None:
    handler = _endless(b"x", start=_COMPLETION_END, content_type="text/event-stream")
    async with scripted_server(handler) as url, connected(url, model="m") as client:
        assert (await answer(client, COMPLETION))[0] == "a"


def _endless(part: bytes, *, start: bytes = b"", status: int = 200, content_type: str = "application/json") -> Handler:
    """Answer with bytes until the client leaves."""

    async def handler(request: Any) -> Any:
        await request.read()
        response = web.StreamResponse(status=status, headers={"Content-Type": content_type})
        await response.prepare(request)
        await response.write(start)
        with suppress(ConnectionError):
            while True:
                await response.write(part * (2**17 // len(part)))
        return response

    return handler


async def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with connected(url, model="m") as client:
            error, _ = await failure(client, CHAT)
            with pytest.raises(BackendError, match=r"cannot connect to .*: Connection refused; is the server running"):
                await client.ask()
    assert error.kind == "connect"


@pytest.mark.parametrize("key", [KEY, ""])
async def test_a_wrong_key_and_no_key(key: str) -> None:
    async with StubBackend(key="another") as stub, connected(stub.url, key=key) as client:
        with pytest.raises(BackendError) as caught:
            await client.ask()
        error, _ = await failure(client, CHAT)
    assert (caught.value.kind, error.kind, error.status) == ("server", "server", 401)
    assert ("is its key right?" in str(error)) == bool(key)
    assert KEY not in str(error)


@pytest.mark.parametrize("status", [200, 400, 401, 500])
async def test_a_key_that_a_backend_repeats_is_not_shown(status: int) -> None:
    body = f'{{"error": {{"message": "Incorrect key {KEY}"}}}}'
    handlers: list[Handler] = [replying(status, body)]
    if status == 200:
        handlers.append(streaming(f"data: {body}\n\n".encode()))
    for handler in handlers:
        async with scripted_server(handler) as url, connected(url, key=KEY, model="m") as client:
            error, _ = await failure(client, CHAT)
            assert "Incorrect key ***" in str(error)


async def test_the_key_is_sent() -> None:
    stub = StubBackend(key=KEY)
    async with asked(stub, key=KEY) as client:
        await answer(client, CHAT)
    assert stub.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("body", ["<html>hello</html>", "{}", "[1]", ""])
async def test_not_an_openai_server(body: str) -> None:
    kind = "text/html" if body.startswith("<") else "application/json"
    async with scripted_server(replying(200, body, kind)) as url, connected(url) as client:
        with pytest.raises(BackendError, match="is it an OpenAI-compatible server"):
            await client.ask()
        for request in (CHAT, {"input": "x"}):
            error, _ = await failure(client, request)
            assert (error.kind, "is it an OpenAI-compatible server" in str(error)) == ("protocol", True)


async def test_a_base_path() -> None:
    paths = []

    async def handler(request: Any) -> Any:
        paths.append(request.path)
        if request.path.endswith("/models"):
            return await replying(200, '{"data": [{"id": "m"}]}')(request)
        return await streaming(_COMPLETION_END)(request)

    async with scripted_server(handler) as url, connected(f"{url}/api/v3/", kind="openai") as client:
        await client.ask()
        await answer(client, COMPLETION)
        await client.read_load()
    assert paths == ["/api/v3/models", "/api/v3/completions"]


def test_addresses_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="not an address of a server"):
        HttpBackend(BackendSpec(url="http://"))


async def test_metrics_of_a_backend() -> None:
    stub = StubBackend(num_tokens=1000, token_delay=0.01, max_concurrency=1)
    async with asked(stub) as client, aclosing(client.forward(attempt(CHAT))) as items:
        await anext(items)
        waiting = asyncio.ensure_future(anext(client.forward(attempt(CHAT))))
        await until(lambda: stub.num_waiting)
        assert await client.read_load() == BackendLoad(1, 1, 0)
        waiting.cancel()
        stub.metrics = False
        assert await client.read_load() is None


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "eventlm"])
async def test_an_answer_goes_on_where_another_backend_stopped(kind: Any) -> None:
    prompts: list[dict[str, Any]] = [
        CHAT | {"max_tokens": 15},
        {"prompt": "hello", "max_tokens": 15},
        {"prompt": [5, 6, 7], "max_tokens": 15},
    ]
    stub = StubBackend(kind, num_tokens=20, faults=[Fault("cut", numbers=(2, 5, 8), after=6)])
    async with asked(stub) as client:
        for body in prompts:
            body |= {"return_token_ids": True}
            assert client.can_continue(forwarded(body))
            whole, deltas, _ = await answer(client, body)
            whole_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            assert len(whole_ids) == 15
            _, text = await failure(client, body)
            shown_ids = whole_ids[:6] if isinstance(body.get("prompt"), list) else []
            rest, _, ended = await answer(client, body, text=text, token_ids=shown_ids, num_tokens=6)
            assert (text + rest, ended.reason, ended.usage.completion) == (whole, "length", 9)
            shown_ids = whole_ids if shown_ids else []
            assert await answer(client, body, text=whole, token_ids=shown_ids, num_tokens=15) == (
                "",
                [],
                AnswerEnd("length"),
            )


async def test_a_backend_without_tls() -> None:
    async with StubBackend() as stub, connected(stub.url.replace("http:", "https:")) as client:
        with pytest.raises(BackendError, match=r"does not speak TLS .* an http: one") as caught:
            await client.ask()
    assert caught.value.kind == "connect"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "own")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with StubBackend(tls=context) as stub:
        for spec in ({"ca_file": str(certificate)}, {"verify": False}):
            async with connected(stub.url, **spec) as client:
                await client.ask()
                await answer(client, CHAT)
        async with connected(stub.url) as client:
            with pytest.raises(BackendError, match=r"certificate that is not trusted .*ca_file=FILE") as caught:
                await client.ask()
            assert caught.value.kind == "connect"
        for path in (tmp_path / "missing.pem", key):
            with pytest.raises(UsageError, match=path.name):
                HttpBackend(BackendSpec(url=stub.url, ca_file=str(path)))
