"""The listening server: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiohttp import web

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.api import APIS
from eventlm.server.app import make_app
from eventlm.server.batches.folder import BATCHES
from eventlm.server.batches.worker import BatchWorker
from eventlm.server.context import ServerContext
from eventlm.server.cors import check_origins
from eventlm.server.http.connection import Gate
from eventlm.server.http.listener import Listener
from eventlm.server.http.tls import Tls
from eventlm.system.listening_sockets import bind_sockets, check_address
from eventlm.tasks import completed


class HttpServer:
    """A listening server over a context. `start`, then `drain` and `close`.

    `sockets` are already bound (`bind_sockets`). Without any it binds the configured address.
    """

    def __init__(self, context: ServerContext, sockets: Sequence[socket.socket] = ()) -> None:
        self._context = context
        self._sockets = sockets
        # A client that leaves cancels its handler, which cancels its request.
        self._runner = web.AppRunner(
            make_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        self._gate: Gate | None = None
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_connections(self) -> int:
        """Open connections and TLS handshakes."""
        return 0 if self._gate is None else self._gate.num_connections

    async def start(self) -> tuple[str, int]:
        """Bind and listen. Returns the address in use. Raises UsageError if it cannot be bound."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        gate = self._gate = Gate(self._context.system, self._context.config, manager)
        try:
            host, port = await self._listen(gate)
        except UsageError:
            await self._runner.cleanup()
            raise
        self._tasks = [asyncio.create_task(self._context.keys.watch(), name="API keys")]
        app = self._runner.app
        if (folder := app.get(BATCHES)) is not None:
            worker = BatchWorker(self._context, folder, app[APIS])
            self._tasks.append(asyncio.create_task(worker.run(), name="batches"))
        return host, port

    async def _listen(self, gate: Gate) -> tuple[str, int]:
        """Accept connections. Returns the address in use."""
        config = self._context.config
        sockets = self._sockets or (await bind_sockets(config.host, config.port, 1))[0]
        self._listener = Listener(gate, self._context.tls, sockets)
        host, port = sockets[0].getsockname()[:2]
        return host, port

    async def drain(self, cut: asyncio.Event) -> None:
        """Refuse new requests with a 503 and finish the running ones; `cut` ends them at once."""
        await self._context.drain(cut)

    async def close(self) -> None:
        """Stop listening and close what is open."""
        if self._listener is not None:
            await self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()
        await self._context.close()


async def check_config(config: ServerConfig, *, binds: bool = True) -> None:
    """Raise UsageError if a server could not start: for origins, a certificate, or an address that cannot be bound.

    This is cheap, unlike the steps before a real start. binds: False if it gets sockets that are bound.
    """
    check_origins(config)
    Tls.of(config)
    if binds:
        await check_address(config.host, config.port)


async def run_server(
    context: ServerContext,
    *,
    sockets: Sequence[socket.socket] = (),
    stop: asyncio.Event,
    cut: asyncio.Event,
    load: Callable[[], Coroutine[Any, Any, None]] | None = None,
    on_listening: Callable[[str], Any] | None = None,
    on_ready: Callable[[str], Any] | None = None,
    on_draining: Callable[[int], Any] | None = None,
) -> None:
    """Serve until `stop` is set, then drain; `cut` makes that short.

    Listens first and then awaits `load`, during which clients get a 503. `on_listening` and `on_ready` get the server's
    URL, `on_draining` the number of running requests. The caller stops the engine. Raises UsageError if the address
    cannot be bound, and what `load` raises.
    """
    server = HttpServer(context, sockets)
    url = url_of(context.config, *await server.start())
    try:
        if on_listening is not None:
            on_listening(url)
        if load is None or await completed(load(), stop):
            if on_ready is not None:
                on_ready(url)
            await stop.wait()
        if on_draining is not None:
            on_draining(context.num_running)
        await server.drain(cut)
    finally:
        await server.close()


def url_of(config: ServerConfig, host: str, port: int) -> str:
    """The server's URL at an address."""
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
