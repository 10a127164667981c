"""An asynchronous client of any server that speaks OpenAI's API: eventlm, vLLM, SGLang, llama.cpp, OpenAI.

It is made to cost little per token, because it decides what a benchmark can consume: the bytes of a socket read are
stamped once, split into events and decoded straight into structs.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from eventlm.client.chunks import DONE, decode_chunk
from eventlm.client.errors import ClientError, from_status, from_transport, message_of, server_message
from eventlm.client.sse import SseDecoder, StreamDelta
from eventlm.errors import UsageError

DEFAULT_TIMEOUT_SECONDS = 600.0
#: Below the 5 s after which uvicorn, under vLLM and SGLang, closes an idle connection: a request must not meet that.
_KEEPALIVE_SECONDS = 4.0
#: How long a connection may stay open after `[DONE]` before it is given up.
_DONE_PATIENCE_SECONDS = 1.0
_READ_BYTES = 256 * 1024


class _Model(Struct):
    id: str


class _ModelList(Struct):
    data: list[_Model]


class OpenAIClient:
    """A client of the server at `url`, with or without `/v1`. Use it in `async with`.

    `timeout_seconds` bounds the time to connect and every silence of the server. `max_connections` 0 sets no limit.
    Every method raises ClientError; an impossible `url` is a UsageError.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        max_connections: int = 0,
    ) -> None:
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._timeout_seconds, sock_read=self._timeout_seconds
            ),
            read_bufsize=_READ_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def models(self) -> list[str]:
        """Names of the models that the server serves."""
        async with self._request("GET", "/models") as response:
            body = await response.read()
        try:
            return [model.id for model in msgspec.json.decode(body, type=_ModelList).data]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ClientError(
                f"{self.url}/models did not answer with a list of models; is it an OpenAI-compatible server?",
                "protocol",
            ) from error

    def stream_chat(self, body: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        """POST `body` to /v1/chat/completions and yield what comes. Leaving early closes the connection."""
        return self._stream("/chat/completions", body)

    def stream_completion(self, body: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        """POST `body` to /v1/completions and yield what comes. Leaving early closes the connection."""
        return self._stream("/completions", body)

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        async with self._request("POST", path, {**body, "stream": True}) as response:
            if response.content_type in ("application/json", "text/html"):
                raise self._not_a_stream(path, await response.read())
            finished = begun = False
            async for events, received_ns in _reads(response):
                for event in events:
                    if event == DONE:
                        await _read_to_end(response)
                        if not begun:
                            # What a proxy makes of a failure.
                            raise ClientError(f"{self.url}{path} ended its stream before any output", "broken")
                        return
                    for delta in self._deltas(path, event, received_ns):
                        begun = True
                        finished |= delta.finish_reason is not None
                        yield delta
            if not finished:
                raise ClientError(f"{self.url}{path} ended its stream without a finish reason", "broken")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply, if its status is 200; what fails until its end becomes a ClientError."""
        if self._session is None:
            raise RuntimeError("an OpenAIClient is used in `async with`")
        url = self.url + path
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, url, data=data, headers=headers) as response:
                if response.status != 200:
                    answer, has_key = await response.read(), bool(self._headers)
                    raise from_status(url, response.status, response.reason, answer, response.headers, has_key=has_key)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise from_transport(url, error, timeout_seconds=self._timeout_seconds) from error

    def _not_a_stream(self, path: str, body: bytes) -> ClientError:
        message = server_message(body)
        if message is not None:
            return ClientError(f"{self.url}{path} failed: {message}", "server")
        return ClientError(
            f"{self.url}{path} did not answer with a stream of events; is it an OpenAI-compatible server?", "protocol"
        )

    def _deltas(self, path: str, event: bytes, received_ns: int) -> list[StreamDelta]:
        """What one event's data says. Raises ClientError for an error and for what is no chunk."""
        try:
            chunk = decode_chunk(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ClientError(f"{self.url}{path} sent an event that is no chunk: {error}", "protocol") from error
        if chunk.error is not None:
            raise ClientError(f"{self.url}{path} failed: {message_of(chunk.error) or chunk.error}", "server")
        if not chunk.choices:
            return [] if chunk.usage is None else [StreamDelta(0, "", None, chunk.usage, received_ns)]
        deltas = []
        for choice in chunk.choices:
            text, reasoning = choice.text or "", ""
            if choice.delta is not None:
                text = choice.delta.content or ""
                reasoning = choice.delta.reasoning_content or choice.delta.reasoning or ""
            deltas.append(
                StreamDelta(choice.index, text, choice.finish_reason or None, chunk.usage, received_ns, reasoning)
            )
        return deltas


def base_url(url: str) -> str:
    """`url` with a scheme and an API version, without a slash at its end: the `base_url` of OpenAI's own client.

    Raises UsageError if it cannot be an address.
    """
    given = url
    if "://" not in url:
        url = f"http://{url}"
    url = url.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(f"{given!r} is not an address of a server; give one such as http://127.0.0.1:8000")
    return url if re.search(r"/v\d+$", parts.path) else f"{url}/v1"


async def _reads(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[list[bytes], int]]:
    """The data of the events that each read of the socket completes, and its time."""
    decoder = SseDecoder()
    async for data in response.content.iter_any():
        received_ns = time.monotonic_ns()
        yield decoder.feed(data), received_ns
    yield decoder.end(), time.monotonic_ns()


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read what comes after `[DONE]`, so that the connection can be used again; give up on one that stays open."""
    try:
        async with asyncio.timeout(_DONE_PATIENCE_SECONDS):
            await response.content.read()
    except (TimeoutError, aiohttp.ClientError):
        response.close()
