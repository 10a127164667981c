"""One request and its reply, over a plain connection."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any


class Reply:
    """Status, headers and body of one exchange."""

    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.data = data

    def json(self) -> Any:
        return json.loads(self.data)

    def events(self) -> list[Any]:
        """The `data:` lines of a stream; `[DONE]` stays a string."""
        lines = [line for line in self.data.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        payloads = [line.removeprefix("data: ") for line in lines]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request on a connection of its own."""
    with closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
