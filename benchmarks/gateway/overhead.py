"""What going through the gateway costs, beside going direct and through a plain proxy in aiohttp.

    python -m benchmarks.gateway.overhead [--loads paced full many] [--streams 256] [--requests 1024] [--tokens 64]
                                          [--token-ms 50] [--rounds 3] [--many-backends 1000] [--many-streams 10000]
                                          [--many-tokens 24] [--many-token-ms 5000]

`paced`: each of the streams gets a token every --token-ms, and a new request when its last one has ended. `full`: the
backend sends as fast as it is read. The ways take turns in each round; first tokens are compared within a round, and
the medians of the rounds are printed. The gateway runs as users start it, recording to a temporary folder: in one
process, and with one front end. `many`: so many streams at once over so many backends through one front end, with the
most memory that the gateway's processes held; all begin within half of the time that a stream takes.

Client, backend and gateway share the machine's cores. Processor time a token is that of each process: with a core to
itself it does up to 1 s / that time (`limit`: of the busiest one between client and backend).
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy

from benchmarks.gateway.processes import Gateway, Helper, backend_flags, cpu_of, run_streams
from benchmarks.start import peak_bytes
from eventlm.table import table

DIRECT, PROXY = "direct", "aiohttp proxy"
COLUMNS = (
    "way",
    "tokens/s",
    "TTFT p50",
    "p99 ms",
    "added p50",
    "p99 ms",
    "us/token: hop",
    "backend",
    "client",
    "limit",
)


class Measured(NamedTuple):
    """One load. ttft: its p50 and p99 in ms. us: microseconds of processor time a token, by process."""

    tokens_per_second: float
    ttft: tuple[float, float]
    us: dict[str, float]


def measure(way: Helper | Gateway, others: Mapping[str, Helper], flags: Sequence[str]) -> Measured:
    """Put a load on a way to the backends."""
    processes = {**way.pids, **{name: pid for name, other in others.items() for pid in other.pids.values()}}
    before = cpu_of(processes)
    found = run_streams(way.urls[0], *flags)
    seconds = {name: spent - before[name] for name, spent in cpu_of(processes).items()} | {"client": found.cpu_seconds}
    p50, p99 = numpy.percentile(found.ttft_ms, [50, 99])
    us = {name: spent / found.num_tokens * 1e6 for name, spent in seconds.items()}
    return Measured(found.num_tokens / found.seconds, (p50, p99), us)


def rounds(arguments: argparse.Namespace, folder: Path, *, token_ms: float) -> list[dict[str, Measured]]:
    """All ways in each round, which begin with another one each time."""
    tokens, streams = ("--tokens", str(arguments.tokens)), ("--streams", str(arguments.streams))
    with ExitStack() as stack:
        backend = stack.enter_context(Helper("backend", *tokens, "--token-ms", str(token_ms)))
        flags = [*backend_flags(backend.urls, arguments.streams), "--max-connections", str(2 * arguments.streams)]
        ways: dict[str, Helper | Gateway] = {
            DIRECT: backend,
            PROXY: stack.enter_context(Helper("proxy", backend.urls[0])),
            "gateway": stack.enter_context(Gateway(folder / "one process", *flags)),
            "gateway, 1 front end": stack.enter_context(Gateway(folder / "front end", *flags, "--api-servers", "1")),
        }
        load = [*tokens, *streams, "--ramp-ms", str(token_ms * arguments.tokens)]
        for way in ways.values():
            run_streams(way.urls[0], *load, "--requests", str(arguments.streams))
        found = []
        for number in range(arguments.rounds):
            names = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
            whole = [*load, "--requests", str(arguments.requests)]
            found.append({name: measure(ways[name], {"backend": backend}, whole) for name in names})
        return found


def rows(found: Sequence[Mapping[str, Measured]]) -> Iterator[tuple[str, ...]]:
    """A row for each way: medians of the rounds."""
    for name in sorted(found[0], key=[DIRECT, PROXY].__contains__, reverse=True):
        each = [measured[name] for measured in found]
        ttft = [median(one.ttft[i] for one in each) for i in (0, 1)]
        added = [median(measured[name].ttft[i] - measured[DIRECT].ttft[i] for measured in found) for i in (0, 1)]
        us = {process: median(one.us[process] for one in each) for process in each[0].us}
        backend, client = us.pop("backend"), us.pop("client")
        hops = [] if name == DIRECT else [*us.values()]
        yield (
            name,
            f"{median(one.tokens_per_second for one in each):,.0f}",
            *(f"{value:.1f}" for value in ttft),
            *(f"{value:.2f}" if hops else "" for value in added),
            " + ".join(f"{value:.1f}" for value in hops),
            f"{backend:.1f}",
            f"{client:.1f}",
            f"{1e6 / max(hops):,.0f}" if hops else "",
        )


def many(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what many streams over many backends take."""
    num_backends, num_streams = arguments.many_backends, arguments.many_streams
    tokens = ("--tokens", str(arguments.many_tokens))
    room = str(-(-2 * num_streams // num_backends))
    listed = folder / "backends"
    flags = ["--backend", f"file:{listed},max_concurrency={room}", "--max-connections", str(num_streams + 100)]
    flags += ["--api-servers", "1", "--max-queue-len", str(num_streams)]
    pace = ("--token-ms", str(arguments.many_token_ms), "--ports", str(num_backends))
    with Helper("backend", *tokens, *pace, num_urls=num_backends) as backend:
        listed.write_text("\n".join(backend.urls))
        with Gateway(folder / "many", *flags) as gateway:
            idle = {name: peak_bytes(pid) for name, pid in gateway.pids.items()}
            load = [*tokens, "--streams", str(num_streams), "--requests", str(num_streams)]
            ramp_ms = arguments.many_tokens * arguments.many_token_ms / 2
            found = measure(gateway, {"backend": backend}, [*load, "--ramp-ms", str(ramp_ms)])
            peak = {name: peak_bytes(pid) for name, pid in gateway.pids.items()}
    print(f"\n{num_streams:,} streams over {num_backends:,} backends; ready after {gateway.start_seconds:.1f} s")
    both = {"both": [*peak]} | {name: [name] for name in peak}
    memory = [
        (
            title,
            *(f"{sum(each[name] for name in names) / 2**20:,.0f}" for each in (idle, peak)),
            f"{sum(found.us[name] for name in names):.1f}",
        )
        for title, names in both.items()
    ]
    print("\n".join(table(["process", "MiB before", "MiB at most", "us/token"], memory)))
    print(f"{found.tokens_per_second:,.0f} tokens/s, TTFT p50 {found.ttft[0]:.0f} ms, p99 {found.ttft[1]:.0f} ms")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=["paced", "full", "many"], default=["paced", "full", "many"])
    for name, default in (("streams", 256), ("requests", 1024), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--token-ms", type=float, default=50.0)
    for name, default in (("many-backends", 1000), ("many-streams", 10_000), ("many-tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--many-token-ms", type=float, default=5000.0)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for load in arguments.loads:
            if load == "many":
                many(arguments, folder)
                continue
            (folder / load).mkdir()
            found = rounds(arguments, folder / load, token_ms=arguments.token_ms if load == "paced" else 0.0)
            print(f"\n{load}: {arguments.streams} streams, {arguments.rounds} rounds")
            print("\n".join(table(COLUMNS, [*rows(found)])), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
