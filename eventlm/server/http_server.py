"""The socket: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from aiohttp import web

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.app import make_app
from eventlm.server.context import ServerContext
from eventlm.server.errors import ApiError, internal_error
from eventlm.server.middleware import REQUEST_ID_HEADER, request_id

_log = structlog.get_logger("eventlm.server")


class _Connection(web.RequestHandler):
    """aiohttp's connection, with the error envelope also for what is not HTTP enough to reach the application."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun, an error can no longer be sent")
        error = internal_error()
        if status < 500:
            error = ApiError(status, f"The request is not valid HTTP: {(message or 'bad request').strip()}")
        response = error.to_response()
        response.headers[REQUEST_ID_HEADER] = identity = request_id(request)
        response.force_close()
        _log.info("bad request", request_id=identity, status=status, error=type(exc).__name__)
        return response


class HttpServer:
    """A listening server over a context. `start`, then `drain` and `close`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        # A client that leaves cancels its handler, which cancels its request.
        self._runner = web.AppRunner(
            make_app(context), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Bind and listen; the address in use. Raises UsageError if it cannot be bound."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        manager = self._runner.server
        assert manager is not None
        quiet = logging.getLogger("eventlm.server.aiohttp")

        def connect() -> _Connection:
            return _Connection(manager, loop=loop, access_log=None, logger=quiet)  # type: ignore[arg-type]

        try:
            self._server = await _bind(self._context.config, connect)
        except UsageError:
            await self._runner.cleanup()
            raise
        self._watch = asyncio.create_task(self._context.keys.watch(), name="API keys")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def drain(self, cut: asyncio.Event) -> None:
        """Refuse new requests with a 503 and let those that run end; `cut` makes an end of it at once."""
        await self._context.drain(cut)

    async def close(self) -> None:
        """Stop listening and close what is open."""
        if self._server is not None:
            self._server.close()
        if self._watch is not None:
            self._watch.cancel()
        await self._runner.cleanup()
        self._context.close()


async def check_address(config: ServerConfig) -> None:
    """Raise UsageError if the address cannot be bound now. Costs nothing, unlike what comes before a real start."""
    server = await _bind(config, asyncio.Protocol)
    server.close()
    await server.wait_closed()


async def _bind(config: ServerConfig, connect: Callable[[], asyncio.BaseProtocol]) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(connect, config.host, config.port, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        # uvloop wraps the system's words in its own; the errors of name resolution have no number of the system's.
        number = error.errno or 0 if isinstance(error, OSError) else 0
        reason = os.strerror(number) if number in errno.errorcode else getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another address with --host and --port"
        ) from error


async def run_server(
    context: ServerContext,
    *,
    stop: asyncio.Event,
    cut: asyncio.Event,
    load: Callable[[], Coroutine[Any, Any, None]] | None = None,
    on_listening: Callable[[str], Any] | None = None,
    on_ready: Callable[[str], Any] | None = None,
    on_draining: Callable[[int], Any] | None = None,
) -> None:
    """Serve until `stop` is set, then drain; `cut` makes that short.

    Listens first and then awaits `load`, during which clients get a 503. `on_listening` and `on_ready` get the
    server's URL, `on_draining` the number of requests that are waited for. To stop the engine is the caller's. Raises
    UsageError if the address cannot be bound, and what `load` raises.
    """
    server = HttpServer(context)
    host, port = await server.start()
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        if on_listening is not None:
            on_listening(url)
        if load is None or await _completed(load(), stop):
            if on_ready is not None:
                on_ready(url)
            await stop.wait()
        if on_draining is not None:
            on_draining(context.num_running)
        await server.drain(cut)
    finally:
        await server.close()


async def _completed(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Await `work`, or cancel it and return False if `stop` is set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
