"""`eventlm serve --recover` as real processes: a keeper, and engines that follow one another."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from eventlm.keeper.keeper import MAX_DEATHS
from tests.processes import children, command_line, is_running, wait_until
from tests.serving import Server

#: In the command lines of engines and workers.
ENGINE, WORKER = b"eventlm.cli.serve.engine", b"eventlm.worker.process"
_PROGRAM = """
import sys
from eventlm.cli.main import main
import eventlm.keeper.keeper
from eventlm.keeper.keeper import Keeper
Keeper.__init__.__kwdefaults__["standby_seconds"] = {seconds}
eventlm.keeper.keeper.MAX_DEATHS = {deaths}
sys.exit(main())
"""


class KeptServer(Server):
    """A server under a keeper, with the fake model. standby_seconds: by default none is made ready ahead."""

    def __init__(
        self, folder: Path, *flags: str, standby_seconds: float = 3600, max_deaths: int = MAX_DEATHS, **options: Any
    ) -> None:
        program = [sys.executable, "-c", _PROGRAM.format(seconds=standby_seconds, deaths=max_deaths)]
        super().__init__(folder, "--model", "fake", "--recover", "memory", *flags, program=program, **options)

    def wait_ready(self) -> KeptServer:
        super().wait_ready()
        # So the engine has been in its loop again, and has told the keeper that it serves.
        assert self.is_healthy()
        return self

    def log_events(self, name: str) -> list[dict[str, Any]]:
        """All log events of a name so far."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait for so many log events of a name; the last of them."""

        def find() -> list[dict[str, Any]]:
            assert len(self.log_events(name)) >= count or self.process.poll() is None, self.stderr
            return self.log_events(name)[count - 1 : count]

        found: list[dict[str, Any]] = wait_until(find)
        return found[0]

    @property
    def processes(self) -> list[int]:
        """Process ids of what the keeper has started or adopted."""
        return [pid for pid in children(self.process.pid) if is_running(pid)]

    @property
    def engines(self) -> list[int]:
        """Process ids of all engines, serving or not, the oldest first."""
        return [pid for pid in self.processes if ENGINE in command_line(pid)]

    def wait_spawned(self) -> int:
        """Wait for an engine's process; its id."""

        def find() -> list[int]:
            assert self.process.poll() is None, self.stderr
            return self.engines

        [pid] = wait_until(find)
        return int(pid)

    @property
    def engine(self) -> int:
        """The process id of the one that serves."""
        pid: int = wait_until(lambda: next(iter(self.engines), None))
        return pid

    @property
    def worker(self) -> int:
        """The process id of the only worker, whichever engine has started it."""
        [pid] = [
            pid
            for parent in (self.process.pid, self.engine)
            for pid in children(parent)
            if is_running(pid) and WORKER in command_line(pid)
        ]
        return pid

    def kill_engine(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.engine, number)
