"""The processes of these benchmarks: backends, a plain proxy, the gateway itself and the load, each of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.gateway.streams import Streamed
from benchmarks.server.front_end_cost import children, cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0


class Helper:
    """A module of this package as a process that prints its addresses first. Use it in `with`."""

    def __init__(self, module: str, *flags: str, num_urls: int = 1) -> None:
        command = [sys.executable, "-m", f"benchmarks.gateway.{module}", *flags]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.urls = [self._process.stdout.readline().strip() for _ in range(num_urls)]
        if not self.urls[-1]:
            self._process.wait(PATIENCE_SECONDS)
            raise SystemExit(f"benchmarks.gateway.{module} did not start")

    @property
    def pids(self) -> dict[str, int]:
        """Its process."""
        return {"": self._process.pid}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


class Gateway:
    """`eventlm serve` in front of backends, recording to `folder`. Use it in `with`.

    start_seconds: until it was ready. Raises SystemExit with its log if it does not start.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir()
        self.folder = folder
        self._log = folder / "log"
        began = time.monotonic()
        command = [sys.executable, "-m", "eventlm", "serve", "--port", "0", "--record", str(folder), *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdin=subprocess.DEVNULL)
        while not (found := re.search(r'"url":"([^"]+)".*"event":"ready"', self.log)):
            if self._process.poll() is not None or time.monotonic() > began + PATIENCE_SECONDS:
                self.stop()
                raise SystemExit(f"the gateway did not start:\n{self.log}")
            time.sleep(0.02)
        self.start_seconds = time.monotonic() - began
        self.urls = [found[1]]

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    @property
    def pids(self) -> dict[str, int]:
        """Its processes: `engine`, and `front end 1` and so on if there are any."""
        return children(self._process.pid)

    def stop(self) -> None:
        """End it in order."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def cpu_of(processes: Mapping[str, int]) -> dict[str, float]:
    """Processor seconds of running processes so far."""
    return {name: cpu_seconds(pid) for name, pid in processes.items()}


def run_streams(url: str, *flags: str) -> Streamed:
    """Put a load on a server from a process of its own. Raises SystemExit if some answer was not whole."""
    command = [sys.executable, "-m", "benchmarks.gateway.streams", url, *flags]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    found = msgspec.json.decode(output, type=Streamed)
    if found.failures:
        raise SystemExit(f"{url}: {len(found.failures)} answers were not whole, such as: {found.failures[0]}")
    return found


def backend_flags(urls: Sequence[str], max_concurrency: int) -> list[str]:
    """`--backend` for each."""
    return [part for url in urls for part in ("--backend", f"{url},max_concurrency={max_concurrency}")]
