"""Servers under keepers that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.keeper.kept_server import KeptServer
from tests.processes import is_running, wait_until

StartKept = Callable[..., KeptServer]


@pytest.fixture
def start_kept(tmp_path: Path) -> Iterator[StartKept]:
    """Start a server under a keeper and wait until it is ready."""
    servers: list[KeptServer] = []

    def start(*flags: str, wait: bool = True, **options: Any) -> KeptServer:
        servers.append(KeptServer(tmp_path, *flags, **options))
        if wait:
            servers[-1].wait_ready()
        return servers[-1]

    yield start
    for server in servers:
        engines = server.processes
        server.close()
        wait_until(lambda engines=engines: not any(map(is_running, engines)))
