"""What exporting spans costs a busy server: throughput, and the longest pauses between steps.

    python benchmarks/server/otlp_cost.py [--streams 256] [--rounds 20] [--seconds 3]

One `eventlm serve --otlp-endpoint` as in `dashboard_cost.py`, with a receiver that takes all spans. Windows
in which the process that exports them runs alternate with windows in which it is stopped, in another order each round.
When it runs again it makes up for what it has missed, so a window with it has the work of two. Printed are the same
figures for both, the differences within a round, and the processor time that the process takes for a second of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.server import dashboard_cost
from benchmarks.server.dashboard_cost import SETTLE_SECONDS, Measured, Server, Window, cpu_ns, differences, measure

_LOWEST_PRIORITY = 19


def run_receiver(port: int) -> None:
    """Take all spans and look at none, beside everything else that runs here."""
    os.nice(_LOWEST_PRIORITY)

    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", take)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def exporting_pid(server_pid: int) -> int:
    """The process that exports the spans of a server."""
    for pid in Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split():
        if b"eventlm.telemetry.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise SystemExit("no process exports spans")


async def run_windows(arguments: argparse.Namespace, server: Server, exporter: int) -> list[Window]:
    """The windows of all rounds; `num_watchers` is 1 in those in which spans are exported."""
    windows = []
    order = random.Random(1)
    for number in range(arguments.rounds):
        for is_exporting in order.sample([False, True], 2):
            os.kill(exporter, signal.SIGCONT if is_exporting else signal.SIGSTOP)
            await asyncio.sleep(SETTLE_SECONDS)
            start_ns, before_ns = time.time_ns(), cpu_ns(server.process.pid)
            await asyncio.sleep(arguments.seconds)
            end_ns, after_ns = time.time_ns(), cpu_ns(server.process.pid)
            windows.append(Window(int(is_exporting), number, start_ns, end_ns, after_ns - before_ns))
    os.kill(exporter, signal.SIGCONT)
    return windows


def print_results(measured: list[Measured]) -> None:
    """A row without the process and one with it, then the differences."""
    print(f"{'exporting':>9}{'tokens/s':>12}{'p50 gap ms':>12}{'p99 gap ms':>12}{'engine us/token':>17}")
    for number, name in enumerate(("no", "yes")):
        own = [each for each in measured if each.num_watchers == number]
        p50, p99 = np.percentile(np.concatenate([each.gaps_ns for each in own]) / 1e6, [50, 99])
        rate = statistics.mean(each.tokens_per_s for each in own)
        cpu_us = statistics.mean(each.cpu_us_per_token for each in own)
        print(f"{name:>9}{rate:>12,.0f}{p50:>12.3f}{p99:>12.3f}{cpu_us:>17.2f}")
    names = ("tokens/s in %", "engine time in %", "p99 gap in ms")
    for name, values in zip(names, zip(*differences(measured, 1), strict=True), strict=True):
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        print(f"{name} {statistics.mean(values):+.3f} ± {error:.3f}, median {statistics.median(values):+.3f}")


def print_figures(url: str) -> None:
    """What /metrics says of the spans."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    print(", ".join(line for line in lines if line.startswith("eventlm:otlp_spans")))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--port", type=int, default=4318, help="port of the receiver")
    parser.add_argument("--role", choices=["receiver"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "receiver":
        run_receiver(arguments.port)
        return 0
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{cores} cores, load {load:.1f} before, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        receive = [sys.executable, __file__, "--role", "receiver"]
        receiver = subprocess.Popen([*receive, "--port", str(arguments.port)])
        flags = ("--otlp-endpoint", f"http://127.0.0.1:{arguments.port}")
        server = Server(Path(name), arguments.streams, 0, flags)
        streams = str(arguments.streams)
        client = subprocess.Popen(
            [sys.executable, dashboard_cost.__file__, "--role", "load", "--url", server.url, "--streams", streams],
            env=os.environ | {"LOAD_KEY": server.keys["load"]},
        )
        try:
            server.wait_for_tokens(16 * arguments.streams)
            exporter = exporting_pid(server.process.pid)
            start_ns, before_ns = time.time_ns(), cpu_ns(exporter)
            windows = asyncio.run(run_windows(arguments, server, exporter))
            used_ns, lasted_ns = cpu_ns(exporter) - before_ns, time.time_ns() - start_ns
            if client.poll() is not None:
                raise SystemExit("the load client has ended")
            print_figures(server.url)
        finally:
            client.kill()
            client.wait()
            server.stop()
            receiver.kill()
            receiver.wait()
        print_results(measure(Path(name) / "runs" / "latest" / "trace.jsonl", windows))
        print(f"the process takes {1000 * used_ns / lasted_ns:.0f} ms of processor time a second")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
