"""A Ray cluster on this host: a head without processors, and nodes with addresses of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from eventlm.system.shared_folder import remove_left_folders
from tests.processes import PATIENCE_SECONDS, wait_until

_RAY = [
    *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"),
    *("--object-store-memory", "80000000", "--include-log-monitor", "false"),
]
#: Ray gives a node half a minute to join, which may be too little on a busy machine.
_ATTEMPTS = 4
_ENVIRONMENT = {
    # Otherwise what a node starts has the lowest priority, and other tests come first.
    "RAY_worker_niceness": "0",
    # A node that does not answer five times has died. Ray asks every three seconds.
    "RAY_health_check_period_ms": "500",
}
#: Ray replaces 127.0.0.1 by the host's own address.
_HEAD = "127.0.0.10"


class Node:
    """The processes of one node."""

    def __init__(self, folder: Path, address: str, *options: str, within: Sequence[str] = ()) -> None:
        self.address = address
        self._command = [*within, *_RAY, "--node-ip-address", address, *options]
        self._num_attempts = 0
        self._output = Path(tempfile.mkstemp(dir=folder, prefix="node-")[1])
        self._start()

    def _start(self) -> None:
        self._num_attempts += 1
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it has joined the cluster."""
        while True:
            wait_until(lambda: "Ray runtime started" in self._output.read_text() or self.process.poll() is not None)
            if self.process.poll() is None:
                return
            assert self._num_attempts < _ATTEMPTS, self._output.read_text()
            self._start()

    def kill(self) -> None:
        """End all of its processes at once, as a host ends that loses its power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGKILL)
            for each in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait(PATIENCE_SECONDS)


class Cluster:
    """A head, and nodes that may come and go."""

    def __init__(self, folder: Path, head: str = _HEAD) -> None:
        self._folder = folder
        with socket.create_server((head, 0)) as listening:
            port = listening.getsockname()[1]
        self.address = f"{head}:{port}"
        self.nodes: list[Node] = []
        self._num_added = 0
        self._head = Node(
            folder,
            *(head, "--head", "--port", str(port), "--num-cpus", "0", "--temp-dir", str(folder)),
            *("--include-dashboard", "false", "--no-monitor"),
        )

    def add(self, num_cpus: int = 2, *, address: str = "", within: Sequence[str] = ()) -> Node:
        """A new node, which may not have joined yet. within: a command that runs another."""
        # Ray numbers the sockets of one host, and nodes that start at once would take the same number.
        sockets = self._folder / "session_latest" / "sockets"
        wait_until(lambda: len(list(sockets.glob("raylet*"))) > self._num_added)
        self._num_added += 1
        address = address or f"127.0.0.{10 + self._num_added}"
        node = Node(self._folder, address, "--address", self.address, "--num-cpus", str(num_cpus), within=within)
        self.nodes.append(node)
        return node

    def wait(self) -> None:
        """Until all have joined."""
        for node in (self._head, *self.nodes):
            node.wait()

    def stop(self) -> None:
        """End all of it."""
        for node in (*self.nodes, self._head):
            node.kill()


@contextlib.contextmanager
def running_cluster(num_nodes: int = 2, head: str = _HEAD) -> Iterator[Cluster]:
    """A cluster that is up. Its folder's name must be short: Ray makes sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = Cluster(folder, head)
    try:
        for _ in range(num_nodes):
            cluster.add()
        cluster.wait()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
        # As the next actor would.
        remove_left_folders(Path("/dev/shm"))


def processes_of(node: Node) -> list[psutil.Process]:
    """What runs on a node for engines: actors and the worker processes that they have started."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(node.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                # One that has just ended has none.
                if command and (command[0].startswith("ray::RankActor") or "eventlm.worker.process" in command):
                    found.append(process)
    return found


def worker_pids(node: Node) -> list[int]:
    """Process ids of the worker processes on a node."""
    return [process.pid for process in processes_of(node) if "eventlm.worker.process" in process.cmdline()]
