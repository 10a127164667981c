"""Accepts connections at listening sockets, all that wait at once.

A server of uvloop takes one connection in each turn of its loop. When many streams make turns long, clients that come
then would wait for as many turns as there are clients before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from eventlm.server.http.connection import LINGER_SECONDS, Connection, Gate
from eventlm.server.http.tls import Tls

#: Pause before the next attempt to accept when the system has no free descriptors or memory.
_NO_ROOM_SECONDS = 0.1


class Listener:
    """Connections become those of a gate. With TLS, they count as soon as they are accepted, a handshake has
    `header_timeout_seconds`, and a connection too many is closed before it, since a reply would need one.
    """

    def __init__(self, gate: Gate, tls: Tls | None, sockets: Sequence[socket.socket]) -> None:
        self._gate = gate
        self._tls = tls
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        for each in sockets:
            each.setblocking(False)
            self._listen(each)

    async def close(self) -> None:
        """Accept no more connections and close those in a handshake."""
        if not self._is_closed:
            self._is_closed = True
            for each in self._sockets:
                self._loop.remove_reader(each)
        # Those that were accepted last begin, so that their sockets are closed.
        await asyncio.sleep(0)
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for each in self._sockets:
            each.close()

    def _listen(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:
                # Too few descriptors or too little memory. Connections wait in the queue meanwhile.
                self._loop.remove_reader(listening)
                self._loop.call_later(_NO_ROOM_SECONDS, self._listen, listening)
                return
            accepted.setblocking(False)
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        gate = self._gate
        if self._tls is not None and gate.num_connections >= gate.config.max_connections:
            gate.note_refusal()
            accepted.close()
            return
        connection = gate.connect()
        if self._tls is None:
            connecting = self._connect(accepted, connection)
        else:
            gate.handshakes.add(connection)
            connecting = self._secure(accepted, connection, self._tls)
        task = self._loop.create_task(connecting, name="connection")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        await self._loop.connect_accepted_socket(lambda: connection, accepted)

    async def _secure(self, accepted: socket.socket, connection: Connection, tls: Tls) -> None:
        try:
            # The client does not speak TLS, leaves, or takes too long.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    lambda: connection,
                    accepted,
                    ssl=tls.context,
                    ssl_handshake_timeout=float(self._gate.config.header_timeout_seconds),
                    ssl_shutdown_timeout=LINGER_SECONDS,
                )
        finally:
            self._gate.handshakes.discard(connection)
