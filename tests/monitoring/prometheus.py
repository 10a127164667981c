"""Prometheus itself, for the tests of what is written for it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PATIENCE_SECONDS, wait_until

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="there is no Prometheus; `make prometheus` installs it",
)


def promtool(*arguments: str) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class RunningPrometheus:
    """A server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}") as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])


@contextlib.contextmanager
def running_prometheus(folder: Path, port: int) -> Iterator[RunningPrometheus]:
    """Prometheus with `prometheus.yml` of a folder."""
    address = f"127.0.0.1:{port}"
    command = ["prometheus", "--config.file", "prometheus.yml", "--storage.tsdb.path", "data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--web.listen-address", address], cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://{address}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/-/ready").status == 200)
        return False

    try:
        wait_until(is_ready)
        yield RunningPrometheus(url)
    finally:
        process.kill()
        process.wait()
