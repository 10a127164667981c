"""A client that watches the frames of a server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.processes import PATIENCE_SECONDS


class Watching:
    """A watcher on a socket of its own."""

    def __init__(self, url: str, key: str = "sk-ops", *, receive_bytes: int = 0) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_SECONDS)
        self.socket.connect((host, int(port)))
        head = f"GET /admin/look/live HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"
        self.socket.sendall(head.encode())
        self._file = self.socket.makefile("rb")

    def events(self) -> Iterator[tuple[str, Any]]:
        """Names and contents up to the end of the stream."""
        name = "message"
        for line in self._file:
            if line == b"0\r\n":
                # The last chunk.
                return
            field, _, value = line.decode().strip().partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
                name = "message"

    def close(self) -> None:
        self._file.close()
        self.socket.close()
