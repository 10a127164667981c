"""A server in a thread, over an engine double, for clients that block."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import structlog
import uvloop
from structlog.typing import EventDict

from eventlm.config import ServerConfig, ServiceClass
from eventlm.config.structs import memory_bytes
from eventlm.engine.request_registry import RUN_ON_SECONDS
from eventlm.sampling_params import SamplingParams
from eventlm.server.context import ServerContext
from eventlm.server.http_server import HttpServer
from eventlm.system.disk import SYSTEM_DISK, Disk
from eventlm.system.system import real_system
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import Tokenizer
from tests.http_exchange import Reply, exchange
from tests.processes import PATIENCE_SECONDS
from tests.server.engine_double import EngineDouble, spell


class RunningServer:
    """An `HttpServer` on its own loop and thread."""

    def __init__(
        self,
        config: ServerConfig,
        classes: dict[str, ServiceClass] | None = None,
        disk: Disk = SYSTEM_DISK,
        tokenizer: Tokenizer | None = None,
        forwards: bool = False,
    ) -> None:
        self.engine = EngineDouble(spell("Hello, world"), config)
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        self.engine.keep(seconds=config.resume_seconds or RUN_ON_SECONDS, max_bytes=memory_bytes(config.resume_memory))

        async def start() -> tuple[str, int]:
            self.context = ServerContext(
                real_system()._replace(disk=disk),
                self.engine,
                tokenizer or FakeTokenizer(),
                config,
                forwards=forwards,
                defaults=SamplingParams(eos_token_ids=(257,)),
                classes=classes,
            )
            self._server = HttpServer(self.context)
            return await self._server.start()

        self.host, self.port = self.call(start())
        self.url = f"http://{self.host}:{self.port}"

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_SECONDS)

    def stop(self) -> None:
        """End it. A second call does nothing."""
        if self.loop.is_closed():
            return
        self.call(self._server.close())
        self.call(self.engine.object_store.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        # It holds files, of which a process may have few and select() knows the first 1024 only.
        self.loop.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_SECONDS)
        return exchange(connection, method, path, body, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})

    def chat(self, **fields: Any) -> Reply:
        body = {"model": "test", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": "test", "prompt": "hi", **fields})

    def raw(self, data: bytes) -> socket.socket:
        """A socket with `data` sent on it."""
        connection = socket.create_connection((self.host, self.port), timeout=PATIENCE_SECONDS)
        connection.sendall(data)
        return connection


INVALID = "invalid_request_error"


def assert_error(
    reply: Reply, status: int, type_: str, param: str | None = None, code: str | None = None, message: str = ""
) -> None:
    assert reply.status == status, reply.data
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (type_, param, code), error
    assert message in error["message"]
    assert error["message"]


def assert_serves(server: RunningServer) -> None:
    assert server.chat().json()["choices"][0]["message"]["content"] == "Hello, world"


@contextmanager
def capture_logs() -> Iterator[list[EventDict]]:
    """What is logged, with what is bound to the request that is handled."""
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        yield logs


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def start(
        classes: dict[str, ServiceClass] | None = None,
        disk: Disk = SYSTEM_DISK,
        tokenizer: Tokenizer | None = None,
        forwards: bool = False,
        **settings: Any,
    ) -> RunningServer:
        servers.append(RunningServer(ServerConfig(port=0, **settings), classes, disk, tokenizer, forwards))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(max_body_bytes=64 * 1024)


@pytest.fixture
def start_with_client(
    start_server: Callable[..., RunningServer],
) -> Iterator[Callable[..., tuple[RunningServer, openai.OpenAI]]]:
    """Start servers that each have a client of the openai package."""
    clients: list[openai.OpenAI] = []

    def start(**settings: Any) -> tuple[RunningServer, openai.OpenAI]:
        server = start_server(**settings)
        server.engine.max_model_len = 4096
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))
        return server, clients[-1]

    yield start
    for client in clients:
        client.close()
