"""Listening sockets: how soon those that connect are served."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import uvloop
from aiohttp import web

from eventlm.config import ServerConfig
from eventlm.server.http.connection import Gate
from eventlm.server.http.listener import Listener
from eventlm.system.system import real_system

NUM_CLIENTS = 50


async def turns_until_all_are_connected() -> int:
    """Turns of the loop for clients that have all connected before the first of them."""
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_CLIENTS) as listening:
        clients = [socket.create_connection(listening.getsockname()) for _ in range(NUM_CLIENTS)]
        gate = Gate(real_system(), ServerConfig(), web.Server(cast("web._RequestHandler", None)))
        listener = Listener(gate, None, [listening])
        num_turns = 0
        try:
            async with asyncio.timeout(30):
                while gate.num_open < NUM_CLIENTS:
                    num_turns += 1
                    await asyncio.sleep(0)
        finally:
            await listener.close()
            for client in clients:
                client.close()
        return num_turns


def test_all_that_wait_are_accepted_at_once() -> None:
    assert uvloop.run(turns_until_all_are_connected()) < NUM_CLIENTS / 2
