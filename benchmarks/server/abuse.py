"""Abusive clients against a real server on the loopback, and what they cost it.

python benchmarks/server/abuse.py [--clients 2000] [--rounds 2] [--api-servers N]

Starts `eventlm serve` with the fake model, loads it plainly, lets every attack of `tests/attacks.py` run at it (idle
connections, slow heads, slow bodies, slow readers, clients that leave at every stage, floods of headers, JSON that is
deep or huge, what is not HTTP, a burst of cancels), round after round, and loads it plainly again. It prints what
became of every client, how long an honest client beside them waited, the ratio of the two loads (by the clock, and by
the server's processor time, which depends less on what else runs), and the memory after each round. Exits 1 if a
client hangs or gets a 500, if a file, sequence or block is left, or if the trace does not verify. Ends by itself, in
some two minutes a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eventlm.replay.verify.verifier import verify
from tests.attacks import ATTACKS, HUNG, Client, Target, cancel_burst, completion, run_attack
from tests.processes import children
from tests.serving import Server

#: Short, so that a round is.
TIMEOUTS = ["--header-timeout-seconds", "8", "--body-timeout-seconds", "8"]
TIMEOUTS += ["--idle-timeout-seconds", "8", "--write-timeout-seconds", "8"]
#: For all streams at once, so that none waits for another.
ROOM = ["--max-num-seqs", "2048", "--num-blocks", "300000"]
PATIENCE_SECONDS = 60.0
LOAD_SECONDS = 8.0
LOAD_CONNECTIONS = 32
NUM_CANCELS = 1000
#: Of the clients of a round: these hold connections open, the others need less of them.
SHARES = {"idle": 1.0, "slow head": 0.5, "slow body": 0.25, "slow reader": 0.25}
OTHER_SHARE = 0.5


class Load(NamedTuple):
    """A plain load: requests a second, how long they took at most, and the server's processor time for each."""

    requests_per_second: float
    longest_seconds: float
    cpu_ms: float


async def plain_load(target: Target, pids: list[int], *, seconds: float, num_connections: int) -> Load:
    """Honest clients in a closed loop, each with one connection a request."""
    ends: list[float] = []
    cpu_before = cpu_seconds(pids)
    deadline = time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < deadline:
            started = time.monotonic()
            connection = await Client.connect(target)
            await connection.send(completion(target, number))
            status = await connection.status()
            connection.leave()
            if status != "200":
                raise SystemExit(f"an honest client got {status}")
            ends.append(time.monotonic() - started)

    await asyncio.gather(*(client(number) for number in range(num_connections)))
    return Load(len(ends) / seconds, max(ends), 1000 * (cpu_seconds(pids) - cpu_before) / len(ends))


class HonestClient:
    """One request after the other in a thread, beside an attack. Where one fails, it has waited for the patience."""

    def __init__(self, target: Target) -> None:
        self.waits: list[float] = []
        self._target = target
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> HonestClient:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            started = time.monotonic()
            connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=PATIENCE_SECONDS)
            status = 0
            with contextlib.suppress(OSError, http.client.HTTPException):
                body = json.dumps({"model": self._target.model, "prompt": "hi", "max_tokens": 8})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                status = connection.getresponse().status
            connection.close()
            self.waits.append(time.monotonic() - started if status == 200 else PATIENCE_SECONDS)


def attack_round(target: Target, num_clients: int, pids: list[int]) -> list[str]:
    """Every attack, one after the other; the failures."""
    failures = []
    for name in [*ATTACKS, "cancel burst"]:
        started, cpu_before = time.monotonic(), cpu_seconds(pids)
        with HonestClient(target) as honest:
            if name == "cancel burst":
                found = asyncio.run(cancel_burst(target, min(NUM_CANCELS, num_clients)))
            else:
                num_attackers = int(num_clients * SHARES.get(name, OTHER_SHARE))
                found = asyncio.run(run_attack(ATTACKS[name], target, num_attackers))
        taken, cpu = time.monotonic() - started, cpu_seconds(pids) - cpu_before
        print(f"  {name:<14}{taken:6.1f} s  cpu {cpu:5.1f} s  honest {_waits(honest.waits)}  {_outcomes(found)}")
        bad = [status for status in found if status == HUNG or status in ("500", "502", "504")]
        failures += [f"{name}: {found[status]} clients got {status}" for status in bad]
    return failures


def _waits(waits: list[float]) -> str:
    return f"{len(waits):4} served, longest {max(waits, default=0.0):6.2f} s"


def _outcomes(found: Counter[str]) -> str:
    return ", ".join(f"{status} {number}" for status, number in sorted(found.items()))


def figures(url: str) -> defaultdict[str, float]:
    """Sums of the samples of /metrics; 0 for what has none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_SECONDS) as reply:
        text = reply.read().decode()
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def wait_empty(url: str) -> dict[str, float]:
    """Until no sequence runs or waits and no block is held, or the patience is over; what is left."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = figures(url)
        left = {name: found[name] for name in names if found[name]}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def memory(pids: list[int]) -> str:
    """Of each process."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return " + ".join(f"{each * resource.getpagesize() / 2**20:.0f}" for each in pages) + " MiB"


def cpu_seconds(pids: list[int]) -> float:
    """Processor time of processes."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def open_files(pids: list[int]) -> int:
    """Open files of processes."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def run(server: Server, arguments: argparse.Namespace) -> list[str]:
    """The whole, over a server that runs; the failures."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    target = Target(host, int(port), server.model, max_tokens=2000, patience_seconds=PATIENCE_SECONDS)
    pids = [server.process.pid, *children(server.process.pid)]
    failures: list[str] = []

    def load(name: str) -> Load:
        found = asyncio.run(plain_load(target, pids, seconds=LOAD_SECONDS, num_connections=LOAD_CONNECTIONS))
        print(
            f"{name}: {found.requests_per_second:.0f} requests/s, longest {found.longest_seconds:.2f} s, "
            f"{found.cpu_ms:.2f} ms of processor time each"
        )
        return found

    load("warm-up")
    before = load("before")
    files_before = open_files(pids)
    print(f"memory {memory(pids)}, {files_before} open files")
    for number in range(1, arguments.rounds + 1):
        print(f"round {number}")
        failures += attack_round(target, arguments.clients, pids)
        left = wait_empty(server.url)
        failures += [f"after round {number}: {name} is {value}" for name, value in left.items()]
        time.sleep(10.0)
        files = open_files(pids)
        print(f"memory {memory(pids)}, {files} open files")
        if files > files_before + 2:
            failures.append(f"after round {number}: {files - files_before} files more than before are open")
    after = load("after")
    print(
        f"after / before: {after.requests_per_second / before.requests_per_second:.2f} in requests/s, "
        f"{after.cpu_ms / before.cpu_ms:.2f} in processor time"
    )
    return failures


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--api-servers", type=int, default=0)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", "fake", "--max-queue-len", "4096", *ROOM, *TIMEOUTS]
        flags += ["--api-servers", str(arguments.api_servers)]
        server = Server(Path(folder), *flags)
        try:
            server.wait_ready()
            failures = run(server, arguments)
            if server.stop(number=signal.SIGTERM) != 0:
                failures.append("the server did not end in order")
            result = verify(server.trace)
            print(f"trace: {result.num_decisions} decisions verified")
            if result.divergence is not None or not result.clean_end:
                failures.append(f"the trace: {result.divergence or 'no clean end'}")
        finally:
            server.close()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
