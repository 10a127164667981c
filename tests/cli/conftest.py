"""Servers that end with their test, and commands that need no process of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventlm.cli.main import main
from tests.serving import Server

StartServer = Callable[..., Server]
RunHere = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunHere:
    """Run a command line in a folder of its own and in this process, which keeps its own log: for mistakes, of which
    there are many and which start no engine. Gives exit code, output and errors."""
    monkeypatch.setattr("eventlm.cli.logging_setup.configure_logging", lambda *_, **__: None)
    # Commands freeze what they load, as if the process were theirs to its end.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


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
