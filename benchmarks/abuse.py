"""Clients that mean no good against a real server on the loopback, and what they leave behind.

python benchmarks/abuse.py [--clients 2000] [--rounds 2] [--api-servers N]

Starts `eventlm serve` with the fake model, loads it plainly, lets every attack of `tests/attacks.py` run at it (idle
connections, slow heads, slow bodies, slow readers, clients that leave at every stage, floods of headers, JSON that is
deep or huge, what is not HTTP, a burst of cancels), round after round, and loads it plainly again. It prints what
became of every client, how long an honest client beside them waited, the ratio of the two loads, and the server's
memory after each round. Exits 1 if a client hangs or gets a 500, if a connection, sequence or block is left, or if
the trace does not verify. Ends by itself, in some two minutes a round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.attacks import ATTACKS, HUNG, Client, Target, cancel_burst, completion, run_attack
from tests.serving import Server, children, verified

#: Short, so that a round is.
TIMEOUTS = ["--header-timeout-seconds", "8", "--body-timeout-seconds", "8"]
TIMEOUTS += ["--idle-timeout-seconds", "8", "--write-timeout-seconds", "8"]
PATIENCE_SECONDS = 60.0
LOAD_SECONDS = 8.0
LOAD_CONNECTIONS = 32
NUM_CANCELS = 1000
#: Of the clients of a round: these hold connections open, the others need less of them.
SHARES = {"idle": 1.0, "slow head": 0.5, "slow body": 0.25, "slow reader": 0.25}
OTHER_SHARE = 0.5


class Load(NamedTuple):
    """A plain load: requests a second, and how long they took at most."""

    requests_per_second: float
    longest_seconds: float


async def plain_load(target: Target, *, seconds: float, num_connections: int) -> Load:
    """Honest clients in a closed loop, each with one connection a request."""
    ends: list[float] = []
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
    return Load(len(ends) / seconds, max(ends))


async def honest_client(target: Target, waits: list[float]) -> None:
    """One request after the other beside an attack; how long each took, or the patience where it failed."""
    while True:
        started = time.monotonic()
        status = HUNG
        with contextlib.suppress(OSError, TimeoutError):
            connection = await Client.connect(target)
            await connection.send(completion(target))
            status = await connection.status()
            connection.leave()
        waits.append(time.monotonic() - started if status == "200" else PATIENCE_SECONDS)
        await asyncio.sleep(0.1)


async def attack_round(target: Target, num_clients: int) -> list[str]:
    """Every attack, one after the other; the failures."""
    failures = []
    for name in [*ATTACKS, "cancel burst"]:
        waits: list[float] = []
        honest = asyncio.create_task(honest_client(target, waits))
        started = time.monotonic()
        if name == "cancel burst":
            found = await cancel_burst(target, min(NUM_CANCELS, num_clients))
        else:
            found = await run_attack(ATTACKS[name], target, int(num_clients * SHARES.get(name, OTHER_SHARE)))
        taken = time.monotonic() - started
        honest.cancel()
        print(f"  {name:<14}{taken:7.1f} s   honest {_waits(waits)}   {_outcomes(found)}")
        bad = [status for status in found if status == HUNG or status in ("500", "502", "504")]
        failures += [f"{name}: {found[status]} clients got {status}" for status in bad]
    return failures


def _waits(waits: list[float]) -> str:
    return f"{len(waits):4} served, longest {max(waits, default=0.0):6.2f} s"


def _outcomes(found: Counter[str]) -> str:
    return ", ".join(f"{status} {number}" for status, number in sorted(found.items()))


def figures(url: str) -> dict[str, float]:
    """Sums of the samples of /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_SECONDS) as reply:
        text = reply.read().decode()
    sums: Counter[str] = Counter()
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


def resident_mib(pids: list[int]) -> float:
    """Memory of processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * resource.getpagesize() / 2**20


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
        found = asyncio.run(plain_load(target, seconds=LOAD_SECONDS, num_connections=LOAD_CONNECTIONS))
        print(f"{name}: {found.requests_per_second:.0f} requests/s, longest {found.longest_seconds:.2f} s")
        return found

    load("warm-up")
    before = load("before")
    files_before = open_files(pids)
    print(f"memory {resident_mib(pids):.0f} MiB, {files_before} open files")
    for number in range(1, arguments.rounds + 1):
        print(f"round {number}")
        failures += asyncio.run(attack_round(target, arguments.clients))
        left = wait_empty(server.url)
        failures += [f"after round {number}: {name} is {value}" for name, value in left.items()]
        time.sleep(10.0)
        files = open_files(pids)
        print(f"memory {resident_mib(pids):.0f} MiB, {files} open files")
        if files > files_before + 2:
            failures.append(f"after round {number}: {files - files_before} files more than before are open")
    after = load("after")
    print(f"after / before: {after.requests_per_second / before.requests_per_second:.2f}")
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
        flags = ["--model", "fake", "--max-queue-len", "4096", "--api-servers", str(arguments.api_servers), *TIMEOUTS]
        server = Server(Path(folder), *flags)
        try:
            server.wait_ready()
            failures = run(server, arguments)
            if server.stop(number=signal.SIGTERM) != 0:
                failures.append("the server did not end in order")
            result = verified(server.trace).result
            print(f"trace: {result.num_decisions} decisions verified")
        finally:
            server.close()
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
