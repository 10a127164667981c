"""Servers with clients of the anthropic package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests.processes import PATIENCE_SECONDS
from tests.server.conftest import RunningServer

Start = Callable[..., tuple[RunningServer, anthropic.Anthropic]]


@pytest.fixture
def start_with_anthropic(start_server: Callable[..., RunningServer]) -> Iterator[Start]:
    """Start servers that each have a client."""
    clients: list[anthropic.Anthropic] = []

    def start(**settings: Any) -> tuple[RunningServer, anthropic.Anthropic]:
        server = start_server(**settings)
        server.engine.max_model_len = 4096
        clients.append(
            anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)
        )
        return server, clients[-1]

    yield start
    for client in clients:
        client.close()
