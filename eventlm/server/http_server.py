"""The socket: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

import structlog
from aiohttp import web

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
        response.headers[REQUEST_ID_HEADER] = request_id(request)
        response.force_close()
        _log.info("bad request", status=status, error=type(exc).__name__)
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

    async def start(self) -> tuple[str, int]:
        """Bind and listen; the address in use. Raises UsageError if it cannot be bound."""
        config = self._context.config
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        manager = self._runner.server
        assert manager is not None
        quiet = logging.getLogger("eventlm.server.aiohttp")

        def connect() -> _Connection:
            return _Connection(manager, loop=loop, access_log=None, logger=quiet)  # type: ignore[arg-type]

        try:
            self._server = await loop.create_server(connect, config.host, config.port, backlog=1024)
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise UsageError(
                f"cannot listen on {config.host}:{config.port}: {error}; choose another address with --host and --port"
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def drain(self, cut: asyncio.Event) -> None:
        """Refuse new requests with a 503 and let those that run end; `cut` makes an end of it at once."""
        await self._context.drain(cut)

    async def close(self) -> None:
        """Stop listening and close what is open."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        self._context.encoder.close()


async def run_server(
    context: ServerContext,
    *,
    on_ready: Callable[[str, int], Any] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or until `stop` is set), then drain; a second signal cuts that short.

    The engine is the caller's to start and to stop. Raises UsageError if the address cannot be bound.
    """
    stop = stop or asyncio.Event()
    cut = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            cut.set()
        else:
            _log.info("shutting down", drain_seconds=context.config.drain_seconds)
            stop.set()

    server = HttpServer(context)
    host, port = await server.start()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        loop.add_signal_handler(each, on_signal)
    try:
        if on_ready is not None:
            on_ready(host, port)
        await stop.wait()
        await server.drain(cut)
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
        await server.close()
