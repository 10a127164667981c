"""The limit on open files is raised for connections, or the connections are limited by it."""

from __future__ import annotations

import resource

import pytest

from eventlm.cli.serve.file_limit import raise_file_limit
from eventlm.config import ServerConfig


class Limits:
    """Stands for the system's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: setattr(self, "now", limits))


@pytest.mark.parametrize(
    ("soft", "hard", "after", "max_connections"),
    [
        (1024, 1 << 20, (4352, 1 << 20), 4096),
        (65536, 1 << 20, (65536, 1 << 20), 4096),
        (1024, resource.RLIM_INFINITY, (4352, resource.RLIM_INFINITY), 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), 4096),
        (1024, 2048, (2048, 2048), 1792),
        (64, 64, (64, 64), 1),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: tuple[int, int], max_connections: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    config, warnings = raise_file_limit(ServerConfig(), forwards=False)
    assert limits.now == after
    assert config.max_connections == max_connections
    assert len(warnings) == (max_connections < 4096)
    assert all(f"at most {max_connections} connections" in warning for warning in warnings)


def test_a_forwarded_request_takes_a_second_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 1024, 1 << 20)
    assert raise_file_limit(ServerConfig(max_connections=1000), forwards=True)[1] == []
    assert limits.now[0] == 2256
    limits.now = (1024, 1256)
    config, [warning] = raise_file_limit(ServerConfig(max_connections=1000), forwards=True)
    assert config.max_connections == 500
    assert "needs 2256 open files" in warning
    assert raise_file_limit(ServerConfig(max_connections=1000, api_servers=1), forwards=True)[1] == []
