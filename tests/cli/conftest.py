"""Servers that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serving import Server

StartServer = Callable[..., Server]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start `eventlm serve FLAGS` in a folder of its own and wait until it is ready."""
    servers: list[Server] = []

    def start(
        *flags: str,
        wait: bool = True,
        environment: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
    ) -> Server:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        servers.append(Server(folder, *flags, environment=environment))
        return servers[-1].wait_ready() if wait else servers[-1]

    yield start
    for server in servers:
        server.close()
