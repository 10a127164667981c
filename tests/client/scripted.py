"""A server that answers as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def scripted_server(handler: Handler) -> AsyncIterator[str]:
    """Answer every request by `handler`; yields the URL."""
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def streaming(*parts: bytes, abort: bool = False, content_type: str = "text/event-stream") -> Handler:
    """Answer with a stream whose parts are sent one by one; `abort` cuts the connection after them."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            # So that the parts leave one by one.
            await asyncio.sleep(0)
        if abort:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def replying(status: int, body: str, content_type: str = "application/json") -> Handler:
    """Answer every request with this."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=status, text=body, content_type=content_type)

    return handler
