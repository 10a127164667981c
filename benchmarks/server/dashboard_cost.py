"""What watchers of the dashboard cost a busy server: throughput, and the longest pauses between steps.

    python benchmarks/server/dashboard_cost.py [--streams 256] [--watchers 0 1 8] [--rounds 20] [--seconds 3]
        [--front-ends 0]

One `eventlm serve` with the fake worker, recording to a temporary folder, and a load client in a process of its own
that keeps so many streams busy. Windows of a few seconds with each number of watchers alternate, in another order each
round. A watcher does what the page does: it reads `/admin/look/live`, and asks for `/admin/look/requests` every two
seconds. Throughput and steps are read from the trace afterwards, so nothing is measured that is not the engine's own.

Printed are, for each number of watchers, tokens per second, the 50th and 99th percentile of the time between two steps,
and the processor time of the engine's process for a token; then the differences to no watcher within a round, as mean
and standard error. On a machine with fewer cores than busy processes the wall shows all of them; processor time does
not. Last is what watchers cost an engine that has nothing else to do, in processor time a second: the part of a core
that they take, and so of the throughput of an engine that is bound by its core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from eventlm.bench.load import Load
from eventlm.bench.records import LoadRequest
from eventlm.bus.log_reader import LogReader
from eventlm.client.openai_client import OpenAIClient
from eventlm.events import Emitted, Header, StepCompleted

#: Nothing of the worker's time is waiting: the steps follow each other as fast as they are computed.
FAKE = "base_ns=1000,prefill_token_ns=1,decode_ns=1,context_token_ns=0"
PROMPT = "The quick brown fox jumps over the lazy dog"
PATIENCE_SECONDS = 120.0
TOKENS = 256
#: As the page does.
POLL_SECONDS = 2.0
#: After a change of the watchers, so that their first requests are over.
SETTLE_SECONDS = 0.5
IDLE_ROUNDS = 3
SCOPES = {"load": '["inference"]', "ops": '["admin"]'}


class Window(NamedTuple):
    """A time, by the host's clock, with so many watchers; and the processor time of the engine's process in it."""

    num_watchers: int
    round: int
    start_ns: int
    end_ns: int
    cpu_ns: int


class Measured(NamedTuple):
    """What the trace says of a window. gaps_ns: between the ends of two steps."""

    num_watchers: int
    round: int
    tokens_per_s: float
    gaps_ns: np.ndarray
    cpu_us_per_token: float

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.gaps_ns, 99)) / 1e6


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


class Server:
    """`eventlm serve` in a folder, with a key for the load and one for the watchers."""

    def __init__(self, folder: Path, num_streams: int, num_front_ends: int, further_flags: Sequence[str] = ()) -> None:
        self.keys = {name: secrets.token_hex(16) for name in SCOPES}
        file = folder / "keys.toml"
        tables = (f'[[keys]]\nname = "{name}"\nkey = "{self.keys[name]}"\nscopes = {SCOPES[name]}\n' for name in SCOPES)
        file.touch(0o600)
        file.write_text("".join(tables))
        flags = ["--model", "fake", "--fake", FAKE, "--num-blocks", "20000", "--max-num-seqs", str(num_streams)]
        flags += ["--max-num-batched-tokens", str(max(num_streams, 2048)), "--api-servers", str(num_front_ends)]
        serve = [sys.executable, "-m", "eventlm", "serve", "--port", "0", "--record", "runs"]
        stderr = folder / "stderr"
        with stderr.open("wb") as log:
            command = [*serve, *flags, *further_flags, "--api-keys-file", "keys.toml"]
            self.process = subprocess.Popen(command, cwd=folder, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := re.search(r'"url":"([^"]+)".*"event":"ready"', stderr.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{stderr.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until it has said so many."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.url}/metrics") as reply:
                lines = reply.read().decode().splitlines()
            said = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
            if sum(float(line.rpartition(" ")[2]) for line in said) >= num_tokens:
                return
            time.sleep(0.1)
        raise SystemExit("the server says nothing")

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)


async def run_load(url: str, key: str, num_streams: int) -> None:
    """So many streams at once until the process is ended."""
    bodies = (
        LoadRequest(seed, {"model": "fake", "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "ignore_eos": True})
        for seed in range(1 << 40)
    )
    async with OpenAIClient(url, timeout_seconds=PATIENCE_SECONDS, api_key=key) as client:
        await Load(client, "completions", bodies, max_concurrency=num_streams).run(asyncio.Event())


async def watch(url: str, key: str, seen: asyncio.Event) -> None:
    """Do what the page does until cancelled."""
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout()) as session:

        async def poll() -> None:
            while True:
                async with session.get("/admin/look/requests?limit=20") as reply:
                    await reply.read()
                await asyncio.sleep(POLL_SECONDS)

        polling = asyncio.create_task(poll())
        try:
            async with session.get("/admin/look/live") as stream:
                async for _ in stream.content:
                    seen.set()
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling


@asynccontextmanager
async def watched(url: str, key: str, num_watchers: int) -> AsyncIterator[None]:
    """So many watchers, each of which has seen a frame."""
    seen = [asyncio.Event() for _ in range(num_watchers)]
    watchers = [asyncio.create_task(watch(url, key, each)) for each in seen]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(each.wait() for each in seen))
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def run_windows(arguments: argparse.Namespace, server: Server, num_rounds: int) -> list[Window]:
    """The windows of so many rounds, under whatever load is under way."""
    windows = []
    order = random.Random(1)
    for number in range(num_rounds):
        for num_watchers in order.sample(arguments.watchers, len(arguments.watchers)):
            async with watched(server.url, server.keys["ops"], num_watchers):
                await asyncio.sleep(SETTLE_SECONDS)
                start_ns, before_ns = time.time_ns(), cpu_ns(server.process.pid)
                await asyncio.sleep(arguments.seconds)
                end_ns, after_ns = time.time_ns(), cpu_ns(server.process.pid)
            windows.append(Window(num_watchers, number, start_ns, end_ns, after_ns - before_ns))
    return windows


def measure(trace: Path, windows: Sequence[Window]) -> list[Measured]:
    """What the trace says of each window."""
    origin_ns = 0
    emitted: list[tuple[int, int]] = []
    completed: list[int] = []
    with LogReader(trace) as reader:
        for line in reader:
            match line.event():
                case Header() as header:
                    origin_ns = origin_ns or int(header.unix_start_ns) - header.ts
                case Emitted() as event:
                    emitted.append((event.ts, event.num_tokens))
                case StepCompleted() as event:
                    completed.append(event.ts)
    steps = np.array(completed) + origin_ns
    times, tokens = np.array(emitted, dtype=np.int64).T
    found = []
    for window in windows:
        start_ns, end_ns = window.start_ns, window.end_ns
        inside = (times + origin_ns >= start_ns) & (times + origin_ns < end_ns)
        num_tokens = int(tokens[inside].sum())
        # Results of two steps can be taken in at once.
        gaps = np.diff(np.unique(steps[(steps >= start_ns) & (steps < end_ns)]))
        rate = num_tokens / (end_ns - start_ns) * 1e9
        cpu_us = window.cpu_ns / max(num_tokens, 1) / 1e3
        found.append(Measured(window.num_watchers, window.round, rate, gaps, cpu_us))
    return found


def differences(measured: Sequence[Measured], num_watchers: int) -> list[tuple[float, float, float]]:
    """By round, to no watcher: throughput and processor time of a token in percent, p99 of the gaps in ms."""
    base = {each.round: each for each in measured if not each.num_watchers}
    return [
        (
            100 * (each.tokens_per_s / base[each.round].tokens_per_s - 1),
            100 * (each.cpu_us_per_token / base[each.round].cpu_us_per_token - 1),
            each.p99_ms - base[each.round].p99_ms,
        )
        for each in measured
        if each.num_watchers == num_watchers
    ]


def print_results(arguments: argparse.Namespace, measured: Sequence[Measured]) -> None:
    """A row for each number of watchers, then the differences."""
    print(f"{'watchers':>8}{'tokens/s':>12}{'p50 gap ms':>12}{'p99 gap ms':>12}{'engine us/token':>17}")
    for num_watchers in arguments.watchers:
        own = [each for each in measured if each.num_watchers == num_watchers]
        gaps = np.concatenate([each.gaps_ns for each in own]) / 1e6
        rate = statistics.mean(each.tokens_per_s for each in own)
        cpu_us = statistics.mean(each.cpu_us_per_token for each in own)
        p50, p99 = np.percentile(gaps, [50, 99])
        print(f"{num_watchers:>8}{rate:>12,.0f}{p50:>12.3f}{p99:>12.3f}{cpu_us:>17.2f}")
    for num_watchers in filter(None, arguments.watchers):
        cells = []
        names = ("tokens/s in %", "engine time in %", "p99 gap in ms")
        for name, values in zip(names, zip(*differences(measured, num_watchers), strict=True), strict=True):
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{name} {statistics.mean(values):+.3f} ± {error:.3f}")
        print(f"{num_watchers} against 0: {', '.join(cells)}")


def print_idle(arguments: argparse.Namespace, windows: Sequence[Window]) -> None:
    """Processor time a second without a load, by number of watchers."""
    cells = []
    for num_watchers in arguments.watchers:
        own = [each.cpu_ns / (each.end_ns - each.start_ns) for each in windows if each.num_watchers == num_watchers]
        cells.append(f"{1000 * statistics.median(own):.2f} with {num_watchers}")
    print(f"idle engine, ms of processor time a second: {', '.join(cells)}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--watchers", type=int, nargs="*", default=[0, 1, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--front-ends", type=int, default=0)
    parser.add_argument("--role", choices=["load"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "load":
        import uvloop

        uvloop.run(run_load(arguments.url, os.environ["LOAD_KEY"], arguments.streams))
        return 0
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load:.1f} before, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder, arguments.streams, arguments.front_ends)
        idle = asyncio.run(run_windows(arguments, server, IDLE_ROUNDS))
        command = [sys.executable, __file__, "--role", "load", "--url", server.url, "--streams", str(arguments.streams)]
        client = subprocess.Popen(command, env=os.environ | {"LOAD_KEY": server.keys["load"]})
        try:
            server.wait_for_tokens(16 * arguments.streams)
            windows = asyncio.run(run_windows(arguments, server, arguments.rounds))
            if client.poll() is not None:
                raise SystemExit("the load client has ended")
        finally:
            client.kill()
            client.wait()
            server.stop()
        print_results(arguments, measure(folder / "runs" / "latest" / "trace.jsonl", windows))
        print_idle(arguments, idle)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
