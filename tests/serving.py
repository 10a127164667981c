"""`eventlm serve` as a real process, and what it recorded, for tests from end to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived, Cancelled, Emitted, Event, Finished, Launched, StepCompleted
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import VerifyResult, verify
from eventlm.worker.fake.tokens import fake_token
from tests.http_exchange import Reply, exchange
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until

CLIENT_SETTINGS: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_SECONDS}


def command(*arguments: str) -> list[str]:
    """The command line of `eventlm ARGUMENTS` in this environment."""
    return [sys.executable, "-m", "eventlm", *arguments]


def run_command(*arguments: str, cwd: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`eventlm ARGUMENTS` as a process, to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=os.environ | environment,
    )


class Server:
    """A server process on a free port, recording to `folder/runs`. Its stderr goes to a file."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        program: list[str] | None = None,
    ) -> None:
        self.folder = folder
        self.stderr_path = folder / "stderr"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*(program or command()), "serve", "--port", "0", "--record", "runs", *flags],
                cwd=folder,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                env=os.environ | (environment or {}),
            )
        self._pids: list[int] = []

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def log_event(self, name: str) -> dict[str, Any]:
        """Wait for a log event; fails if the process ends first."""

        def find() -> dict[str, Any] | None:
            ended = self.process.poll() is not None
            for line in self.stderr.splitlines():
                if line.startswith("{") and line.endswith("}") and (event := json.loads(line))["event"] == name:
                    return dict(event)
            assert not ended, f"the server has ended:\n{self.stderr}"
            return None

        found: dict[str, Any] = wait_until(find)
        return found

    def wait_ready(self) -> Server:
        ready = self.log_event("ready")
        self.url, self.model = ready["url"], ready["model"]
        self._pids = self.worker_pids
        return self

    @property
    def worker_pids(self) -> list[int]:
        return children(self.process.pid)

    @property
    def trace(self) -> Path:
        return self.folder / "runs" / "latest" / "trace.jsonl"

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **(CLIENT_SETTINGS | settings))

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **(CLIENT_SETTINGS | settings))

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        return exchange(connection, method, path, body, headers)

    def complete(self, **fields: Any) -> Reply:
        body = json.dumps({"model": self.model, "prompt": "hi", "max_tokens": 8, **fields}).encode()
        return self.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})

    def figure(self, name: str) -> float:
        """Sum of the samples of /metrics that have this name and labels."""
        lines = self.request("GET", "/metrics").data.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def is_healthy(self) -> bool:
        return self.request("GET", "/health").status == 200

    def stop(self, *, number: int = signal.SIGTERM) -> int:
        """End it by a signal; its exit code. Its workers must go too."""
        pids = {*self._pids, *self.worker_pids}
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_SECONDS)
        wait_until(lambda: not any(map(is_running, pids)))
        return code

    def close(self) -> None:
        """Whatever became of the test: nothing is left."""
        if self.process.poll() is None:
            self.stop(number=signal.SIGKILL)

    def stop_and_verify(self, *, check_invariants: bool = True) -> Trace:
        """End it in order; the trace must verify, without a warning, and have an `end`."""
        assert self.stop() == 0, self.stderr
        trace = verified(self.trace, check_invariants=check_invariants)
        assert trace.result.clean_end
        assert trace.result.warnings == []
        return trace


@contextlib.contextmanager
def serve(folder: Path, *flags: str, check_invariants: bool = False) -> Iterator[Server]:
    """A server that is ready. Whatever is asked of it: at the end it goes in order, and what it recorded verifies.

    To check the core's invariants after every event as well takes long where there are many blocks.
    """
    server = Server(folder, *flags)
    try:
        yield server.wait_ready()
        server.stop_and_verify(check_invariants=check_invariants)
    finally:
        server.close()


class Trace(NamedTuple):
    """A trace that was verified, and its events."""

    result: VerifyResult
    events: list[Event]

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def cancelled_by_clients(self) -> set[int]:
        return {event.request for event in self.of(Cancelled) if event.reason == "client"}

    @property
    def finish_reasons(self) -> Counter[str]:
        return Counter(event.reason for event in self.of(Finished))

    def num_emitted(self) -> dict[tuple[int, int], int]:
        """Output tokens by (seed, index): those of the completed steps, less what the core dropped."""
        seeds = {event.s: int(event.seed) for event in self.of(Arrived)}
        launches = {(event.replica, event.epoch, event.step): event for event in self.of(Launched)}
        counts: Counter[tuple[int, int]] = Counter()
        completed: StepCompleted | None = None
        for event in self.of(StepCompleted, Emitted):
            if isinstance(event, StepCompleted):
                completed = event
                continue
            assert completed is not None
            assert (completed.replica, completed.step) == (event.replica, event.step)
            launch = launches[completed.replica, completed.epoch, completed.step]
            dropped = dict(event.dropped)
            for number, row in enumerate([*launch.decodes, *launch.chunks]):
                counts[seeds[row[0]], row[1]] += completed.produced[number] - dropped.get(number, 0)
        return dict(counts)


def verified(path: Path, *, trust_local_plugins: bool = False, check_invariants: bool = True) -> Trace:
    """Verify a trace, with the core's invariants checked after every event."""
    changes = Changes(trust_local_plugins=trust_local_plugins)
    result = verify(path, changes=changes, check_invariants=check_invariants)
    assert result.divergence is None, result.divergence
    with LogReader(path) as reader:
        return Trace(result, [line.event() for line in reader])


def fake_text(seed: int, num_tokens: int, *, index: int = 0) -> str:
    """What the fake model says, in tokens of one byte; a character that the last one cuts is U+FFFD."""
    data = bytes(fake_token(seed, index, position) for position in range(num_tokens))
    return data.decode(errors="replace")
