"""A plain proxy in aiohttp, which passes on what it gets: the lowest cost of a hop in Python.

    python -m benchmarks.gateway.proxy http://127.0.0.1:8001

It prints its address, and runs until it is ended.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _serve(backend: str) -> None:
    async def relay(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        async with session.post(backend + request.path, data=await request.read(), headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            return response

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
