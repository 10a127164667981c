"""Connections that are to be secure: from when they are accepted they count, and their handshakes have an end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from eventlm.server.http.connection import LINGER_SECONDS, Connection, Gate
from eventlm.server.http.tls import Tls

#: How long nothing is accepted where the system has no room for one more.
_NO_ROOM_SECONDS = 0.1


class TlsListener:
    """Accepts at sockets that listen; `close` ends that and the handshakes under way.

    A handshake has `header_timeout_seconds`. One connection too many is closed before it: an answer would need one.
    """

    def __init__(self, gate: Gate, tls: Tls, sockets: list[socket.socket]) -> None:
        self._gate = gate
        self._tls = tls
        self._sockets = sockets
        for each in sockets:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        self._acceptors = [loop.create_task(self._accept(each), name="TLS listener") for each in sockets]
        self._handshakes: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Nobody is accepted any more; those in a handshake lose their connection."""
        await _end(self._acceptors)
        # By now those that were accepted last have begun theirs, and so it has an end.
        await _end(list(self._handshakes))
        for each in self._sockets:
            each.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop, gate = asyncio.get_running_loop(), self._gate
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue
            except OSError:
                # Of files or of memory: those that wait stay where they are.
                await asyncio.sleep(_NO_ROOM_SECONDS)
                continue
            if gate.num_connections >= gate.config.max_connections:
                gate.note_refusal()
                accepted.close()
                continue
            connection = gate.connect()
            gate.handshakes.add(connection)
            task = loop.create_task(self._secure(accepted, connection), name="TLS handshake")
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _secure(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            # A client may speak no TLS, leave, or take too long.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=float(self._gate.config.header_timeout_seconds),
                    ssl_shutdown_timeout=LINGER_SECONDS,
                )
        finally:
            self._gate.handshakes.discard(connection)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
