"""The client of one backend, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import ssl
import sys
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from eventlm.client.openai_client import base_url
from eventlm.client.sse import TokenUsage
from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import (
    AnswerDelta,
    AnswerEnd,
    AnswerUsage,
    Attempt,
    BackendError,
    BackendFacts,
    BackendLoad,
    Endpoint,
    ForwardedRequest,
)
from eventlm.errors import UsageError
from eventlm.gateway import continuation, discovery
from eventlm.gateway.answers import AnswerReader
from eventlm.gateway.counts import count_of
from eventlm.gateway.failures import from_event, from_status, from_transport
from eventlm.gateway.load import parse_load
from eventlm.gateway.silence import Silence

_PATHS: dict[Endpoint, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
}
#: For a connection, and for each page that is not an answer to a request.
_CONNECT_SECONDS, _PAGE_SECONDS = 5.0, 5.0
#: Below the 5 s after which uvicorn and llama.cpp close an idle connection: a request must not meet that.
_KEEPALIVE_SECONDS = 4.0
#: How long a connection may stay open after an answer before it is given up.
_END_PATIENCE_SECONDS = 1.0
_READ_BYTES = 256 * 1024
#: Most of a reply that is no stream, and what is read of one with an error status.
_MAX_BODY_BYTES, _MAX_ERROR_BYTES = 16 * 2**20, 2**20
#: Kinds without metrics of a known form.
_WITHOUT_METRICS = ("openai", "ollama")


class _Embedding(Struct, frozen=True):
    embedding: str | list[float]


class _ErrorReply(Struct, frozen=True):
    error: Any


class _EmbeddingList(Struct, frozen=True):
    data: list[_Embedding]
    usage: TokenUsage | None = None


class HttpBackend:
    """A client of the backend at `spec.url`. Ask it before the first request. connector: makes what opens and keeps its
    connections, of aiohttp's options.

    Raises UsageError for an address or a certificate's file that cannot be used.
    """

    def __init__(
        self, spec: BackendSpec, *, connector: Callable[..., aiohttp.BaseConnector] = aiohttp.TCPConnector
    ) -> None:
        #: The root of its API, and of its other pages.
        self._api = base_url(spec.url)
        self._root = self._api.rpartition("/")[0]
        self._spec = spec
        self._facts = BackendFacts(kind=spec.kind or "openai")
        self._model = spec.model
        self._connector = connector
        self._ssl = _tls(spec) if self._api.startswith("https:") else True
        self._session: aiohttp.ClientSession | None = None
        #: Replies of whose bytes only the end is missing.
        self._ending: dict[aiohttp.ClientResponse, asyncio.Task[None]] = {}

    @property
    def spec(self) -> BackendSpec:
        """How to reach it."""
        return self._spec

    @property
    def facts(self) -> BackendFacts:
        """As it said when it was asked last."""
        return self._facts

    async def ask(self) -> BackendFacts:
        """Ask for its kind, models and limits. Raises BackendError."""
        found = await discovery.ask(self._spec, self._get)
        self._facts, self._model = found.facts, found.model
        return self._facts

    async def read_load(self) -> BackendLoad | None:
        """Its metrics of now; None if it has none. Raises BackendError."""
        if self._facts.kind in _WITHOUT_METRICS:
            return None
        try:
            return parse_load(await self._get("/metrics"))
        except BackendError as error:
            # A server without metrics says so in one way or another.
            if 400 <= error.status < 500 or error.status == 501:
                return None
            raise

    def can_continue(self, request: ForwardedRequest, *, is_counted: bool = True) -> bool:
        """Whether it can go on from tokens that another backend gave."""
        return continuation.can_continue(self._facts.kind, request, is_counted=is_counted)

    def forward(self, attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        """The answer, of which `AnswerEnd` is the last. Closing the iterator ends the request. Raises BackendError."""
        is_embedding = attempt.request.endpoint == "embeddings"
        return self._embed(attempt) if is_embedding else self._generate(attempt)

    async def close(self) -> None:
        """End its connections."""
        for task in self._ending.values():
            task.cancel()
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str) -> bytes:
        """A page below the root. Raises BackendError."""
        url = (self._api if path.startswith("/v1/") else self._root) + path.removeprefix("/v1")
        deadline = _deadline(_PAGE_SECONDS)
        async with self._reply("GET", url, deadline, _PAGE_SECONDS) as response, asyncio.timeout_at(deadline):
            return await _read_body(url, response)

    async def _generate(self, attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        url, deadline = self._url(attempt), _deadline(attempt.first_seconds)
        is_continued = bool(attempt.text or attempt.token_ids)
        body = continuation.continued(attempt) if is_continued else attempt.request.body
        if body is None:
            # The last attempt failed between its last token and its end.
            yield AnswerEnd("length")
            return
        async with self._posted(url, self._body(attempt, body), attempt, deadline) as response:
            content = response.content
            if response.content_type in ("application/json", "text/html"):
                async with asyncio.timeout_at(deadline):
                    raise self._no_answer(url, await _read_body(url, response), "with a stream of events")
            reader = AnswerReader(url, key=self._spec.key, has_token_chunks=self._facts.kind == "llamacpp")
            is_begun = False
            with Silence(content, deadline, attempt.first_seconds) as silence:
                while not reader.is_over:
                    num_chunks = reader.num_chunks
                    try:
                        data = await content.readany()
                    except TimeoutError as error:
                        raise from_transport(url, error, seconds=silence.seconds) from error
                    silence.num_read += len(data)
                    delta = reader.feed(data) if data else reader.finish()
                    if delta is not None:
                        is_begun = True
                        yield delta
                    # Comments, which keep a connection open, and the opening of a chat are no output.
                    if is_begun and reader.num_chunks > num_chunks:
                        silence.extend(attempt.silence_seconds)
            ended = reader.end()
            self._keep(response)
            yield ended

    def _keep(self, response: aiohttp.ClientResponse) -> None:
        """Let the connection of a whole answer be used again once its reply has ended. Nobody waits for that."""
        if not response.content.is_eof():
            task = asyncio.create_task(_read_to_end(response))
            self._ending[response] = task
            task.add_done_callback(lambda _: self._ending.pop(response))

    async def _embed(self, attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        url, deadline = self._url(attempt), _deadline(attempt.first_seconds)
        async with self._posted(url, self._embedding_body(attempt), attempt, deadline) as response:
            async with asyncio.timeout_at(deadline):
                body = await _read_body(url, response)
        delta, ended = self._embedding(url, body)
        yield delta
        yield ended

    def _url(self, attempt: Attempt) -> str:
        return self._api + _PATHS[attempt.request.endpoint]

    def _posted(
        self, url: str, body: bytes, attempt: Attempt, deadline: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json", "x-request-id": attempt.request_id}
        return self._reply("POST", url, deadline, attempt.first_seconds, data=body, headers=headers)

    @asynccontextmanager
    async def _reply(
        self, method: str, url: str, deadline: float, seconds: float, **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply with status 200. Its connection is closed unless it was read to the end or is kept.

        Raises BackendError, also for what aiohttp raises meanwhile. seconds: what the deadline allowed at first.
        """
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._send(method, url, **content)
            try:
                if response.status != 200:
                    async with asyncio.timeout_at(deadline):
                        body = await _read_start(response, _MAX_ERROR_BYTES)
                    raise from_status(url, response.status, response.reason, body, response.headers, key=self._spec.key)
                yield response
            finally:
                if response not in self._ending:
                    response.close()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise from_transport(url, error, seconds=seconds) from error

    async def _send(self, method: str, url: str, **content: Any) -> aiohttp.ClientResponse:
        """Send a request. A kept connection may have been closed at the other end meanwhile; since nothing was
        answered then, the request is sent again, until it has a new one.
        """
        if self._session is None:
            self._session = self._new_session()
        while True:
            trace = SimpleNamespace(is_reused=False)
            try:
                # A redirect would take the key elsewhere.
                return await self._session.request(
                    method, url, ssl=self._ssl, allow_redirects=False, trace_request_ctx=trace, **content
                )
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError):
                if not trace.is_reused:
                    raise

    def _new_session(self) -> aiohttp.ClientSession:
        headers = {"Accept-Encoding": "identity"}
        if self._spec.key:
            headers["Authorization"] = f"Bearer {self._spec.key}"
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            # The core counts requests.
            connector=self._connector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            read_bufsize=_READ_BYTES,
            trace_configs=[tracing],
        )

    def _body(self, attempt: Attempt, body: bytes) -> bytes:
        """The body of a request for one choice."""
        options = {"include_usage": True}
        if self._facts.kind in ("vllm", "sglang", "eventlm"):
            options["continuous_usage_stats"] = True
        own = {"model": self._model, "n": 1, "seed": attempt.seed, "stream": True, "stream_options": options}
        # The client's part may be long; it is not read here.
        rest = body.strip()[1:]
        separator = b"" if rest.lstrip() == b"}" else b","
        return msgspec.json.encode(own)[:-1] + separator + rest

    def _embedding_body(self, attempt: Attempt) -> bytes:
        body = msgspec.json.decode(attempt.request.body)
        return msgspec.json.encode(body | {"model": self._model, "encoding_format": "base64"})

    def _embedding(self, url: str, body: bytes) -> tuple[AnswerDelta, AnswerEnd]:
        try:
            answer = msgspec.json.decode(body, type=_EmbeddingList)
            [entry] = answer.data
            vector = entry.embedding
            data = base64.b64decode(vector, validate=True) if isinstance(vector, str) else _little_endian(vector)
        except ValueError as error:
            raise self._no_answer(url, body, "with one embedding") from error
        num_tokens = count_of(answer.usage.prompt_tokens if answer.usage is not None else None)
        return AnswerDelta(embedding=data), AnswerEnd("complete", AnswerUsage(prompt=num_tokens))

    def _no_answer(self, url: str, body: bytes, expected: str) -> BackendError:
        """The error for a reply with status 200 that is something else."""
        try:
            error = msgspec.json.decode(body, type=_ErrorReply).error
        except ValueError:
            return BackendError(f"{url} did not answer {expected}; is it an OpenAI-compatible server?", "protocol")
        return from_event(url, error, key=self._spec.key)


def _deadline(seconds: float) -> float:
    """In the loop's time."""
    return asyncio.get_running_loop().time() + seconds


async def _read_body(url: str, response: aiohttp.ClientResponse) -> bytes:
    """All of a reply. Raises BackendError if that is more than any server means to send."""
    body = await _read_start(response, _MAX_BODY_BYTES + 1)
    if len(body) > _MAX_BODY_BYTES:
        raise BackendError(f"{url} answered with more than {_MAX_BODY_BYTES >> 20} MiB", "protocol")
    return body


async def _read_start(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    """A reply, or so many bytes of it."""
    body = bytearray()
    while len(body) < num_bytes and (data := await response.content.readany()):
        body += data
    return bytes(body[:num_bytes])


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    with suppress(TimeoutError, aiohttp.ClientError), closing(response):
        async with asyncio.timeout(_END_PATIENCE_SECONDS):
            while await response.content.readany():
                pass


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
    context.trace_request_ctx.is_reused = True


def _little_endian(values: list[float]) -> bytes:
    vector = array("f", values)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def _tls(spec: BackendSpec) -> ssl.SSLContext | bool:
    """What aiohttp wants in order to check a certificate. Raises UsageError."""
    if not spec.verify:
        return False
    return _trusting(spec.ca_file) if spec.ca_file else True


@lru_cache(maxsize=64)
def _trusting(ca_file: str) -> ssl.SSLContext:
    """A context that trusts the certificates of a file alone; many backends have the same. Raises UsageError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise UsageError(f"{ca_file}: there is no whole certificate in PEM in it") from error
    except OSError as error:
        raise UsageError(f"{ca_file}: {error.strerror}") from error
