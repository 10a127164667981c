"""The running server of the HTTP tests, for what clients see of these modules."""

from __future__ import annotations

from tests.server.conftest import server, start_server, start_with_client

__all__ = ["server", "start_server", "start_with_client"]
