"""First tokens of urgent requests when the queue is the gateway's, beside llama.cpp's own queue, on the same arrivals.

    python -m benchmarks.gateway.queueing [--requests 96] [--load 1.2] [--slots 4] [--ahead 4]
                                          [--policies fcfs edf lrs] [--rounds 2]

llama.cpp's server runs the default model with so many slots (`benchmarks/peers.py` says where it comes from). Three
requests of four are short and have a deadline of half a second, the others are long and have one of twenty seconds.
They arrive at random (Poisson), --load times as fast as the server answers a batch of the same mix, so that a queue
builds up, and its end is waited for. Each gateway sends the server --ahead more than it has slots for: slots can be
filled only between two steps, several may end with one step, and they stay empty if nothing is there by then. The
server has all cores but the first, and everything else has that one. The ways take turns in each round, with the same
arrivals and other prompts, since the server keeps what it has computed; tokens/s are those of the whole mix up to its
last answer, and `of own` is within a round. Printed are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy

from benchmarks.gateway.processes import Gateway, backend_flags
from benchmarks.peer.checkpoints import ModelName, Precision
from benchmarks.peer.servers import Server, Target, free_port
from benchmarks.peer.setup import locate, only_one, set_up
from eventlm.bench.load import Load
from eventlm.bench.records import LoadRequest, LoadResult
from eventlm.client.openai_client import OpenAIClient
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.table import table

OWN_QUEUE = "llama.cpp's own queue"
MODEL: ModelName = "smollm2"
PRECISION: Precision = "q4_1"
CONTEXT_TOKENS = 1024
COLUMNS = ("queue", "short TTFT p50", "p99 ms", "p99 of own", "in time", "long TTFT p99", "tokens/s", "of own")


class Kind(NamedTuple):
    """A kind of request. Lengths in tokens."""

    prompt_tokens: int
    output_tokens: int
    deadline_ms: int


SHORT, LONG = Kind(32, 8, 500), Kind(512, 32, 20_000)
MIX = (SHORT, LONG, SHORT, SHORT)


class Measured(NamedTuple):
    """What came of a load. TTFT in ms: p50 and p99 of short requests, p99 of long ones. in_time: of the short ones."""

    short_p50: float
    short_p99: float
    in_time: float
    long_p99: float
    tokens_per_second: float


def draw(num_requests: int, rate: float, seed: int, way: str = "") -> list[LoadRequest]:
    """The requests, `rate` a second; 0: all at once. Prompts are random tokens, and each way has its own: the server
    keeps what it has computed in a cache.
    """
    rng, words = random.Random(seed), random.Random(f"{seed} {way}")
    now, requests = 0.0, []
    for index in range(num_requests):
        now += rng.expovariate(rate) if rate else 0.0
        kind = MIX[index % len(MIX)]
        body = {
            "model": MODEL,
            "prompt": [words.randrange(1000, 40_000) for _ in range(kind.prompt_tokens)],
            "max_tokens": kind.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "deadline_ms": kind.deadline_ms,
        }
        requests.append(LoadRequest(index, body, round(now * 1e9), kind.prompt_tokens))
    return requests


async def put(url: str, requests: Sequence[LoadRequest]) -> LoadResult:
    """Send them at their times. Raises SystemExit if one fails."""
    async with OpenAIClient(url, timeout_seconds=600) as client:
        result = await Load(client, "completions", iter(requests)).run(asyncio.Event())
    failed = [record.message for record in result.records if not record.is_success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed at {url}, such as: {failed[0]}")
    return result


def measure(url: str, requests: Sequence[LoadRequest]) -> Measured:
    """Put the load on one way to the server."""
    result = asyncio.run(put(url, requests))
    ttft: dict[Kind, list[float]] = {kind: [] for kind in (SHORT, LONG)}
    for record in result.records:
        ttft[MIX[record.index % len(MIX)]].append(record.ttft_ns / 1e6)
    num_tokens = sum(record.output_tokens for record in result.records)
    p50, p99 = numpy.percentile(ttft[SHORT], [50, 99])
    in_time = sum(ms <= SHORT.deadline_ms for ms in ttft[SHORT]) / len(ttft[SHORT])
    return Measured(p50, p99, in_time, numpy.percentile(ttft[LONG], 99), num_tokens * 1e9 / result.duration_ns)


def rows(found: Sequence[Mapping[str, Measured]]) -> Sequence[tuple[str, ...]]:
    """A row for each way: medians of the rounds."""
    listed = []
    for name in (OWN_QUEUE, *sorted(found[0].keys() - {OWN_QUEUE})):
        each = [measured[name] for measured in found]
        own = [measured[OWN_QUEUE] for measured in found]
        p50, p99, in_time, long_p99, rate = (median(values) for values in zip(*each, strict=True))
        shorter = median(one.short_p99 / other.short_p99 for one, other in zip(each, own, strict=True))
        of_own = median(one.tokens_per_second / other.tokens_per_second for one, other in zip(each, own, strict=True))
        times = f"{p50:,.0f}", f"{p99:,.0f}", f"{shorter:.2f}", f"{in_time:.0%}", f"{long_p99:,.0f}"
        listed.append((name, *times, f"{rate:.1f}", f"{of_own:.3f}"))
    return listed


def run(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Measured]]:
    """All ways in each round, which begin with another one each time."""
    peers = locate(cache_folder() / "peers")
    with only_one(peers):
        set_up("llama.cpp", peers)
    target = Target(MODEL, PRECISION, arguments.slots, free_port(), peers, context_tokens=CONTEXT_TOKENS)
    with ExitStack() as stack:
        # Its threads wait for each other: a process that takes a core from one of them for a moment stops all.
        core, *others = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, others or [core])
        server = Server("llama.cpp", target, folder)
        stack.callback(server.stop)
        os.sched_setaffinity(0, [core])
        urls = {OWN_QUEUE: server.url}
        for policy in arguments.policies:
            flags = [
                *backend_flags([server.url], arguments.slots + arguments.ahead),
                "--policy",
                policy,
                "--served-model-name",
                MODEL,
            ]
            urls[policy] = stack.enter_context(Gateway(folder / policy, *flags)).urls[0]
        first, batch = draw(len(MIX), 0.0, 0, "first"), draw(len(MIX) * arguments.slots, 0.0, 0)
        # Nothing that is measured is done for the first time.
        asyncio.run(put(server.url, first))
        seconds = asyncio.run(put(server.url, batch)).duration_ns / 1e9
        rate = arguments.load * len(batch) / seconds
        print(f"{rate:.2f} requests/s", flush=True)
        found = []
        for number in range(arguments.rounds):
            names = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
            found.append(
                {name: measure(urls[name], draw(arguments.requests, rate, number + 1, name)) for name in names}
            )
        return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 96), ("slots", 4), ("ahead", 4), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--load", type=float, default=1.2, help="arrivals, of what the server answers")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "edf", "lrs"])
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(COLUMNS, rows(run(arguments, Path(folder))))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
