"""What the metrics cost: in the drain, and at a scrape.

    python benchmarks/core/metrics_store.py [--steps 400]

Two tables. The store's time for the events of one step (a completion, its emit, the next launch), against that of the
core for the same step, for one replica with `running` decodes. And a scrape of /metrics: how long it takes, and for how
long at most it keeps the loop from anything else. All times are CPU time of the one thread, so that neighbours on the
machine disturb them less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from msgspec import structs

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.core.throughput import PROMPT_TOKENS, RAMP_TOKENS, Case, Run, completion, make_header
from eventlm.events import Arrived, Event, StepCompleted, WorkerUp
from eventlm.metrics.components import SCHEDULING_BUCKETS_NS, EngineMetrics
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.store import MetricsStore
from eventlm.scheduling_params import SchedulingParams
from eventlm.server.endpoints.metrics import OPENMETRICS, render


def record_steps(running: int, num_steps: int) -> tuple[list[Event], int, float]:
    """Events of a machine that is full and then makes steps; where those begin; the core's median us a step."""
    # No sequence ends before the last timed step.
    max_tokens = num_steps + RAMP_TOKENS
    run = Run(make_header("fcfs", Case(running, 0), max_tokens))
    launched, _ = run.apply(WorkerUp(**run.next(), replica=0, epoch=1))
    for _ in range(running):
        arrival = Arrived(
            **run.next(),
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=max_tokens,
            scheduling=SchedulingParams(model="m", offline=True),
        )
        found, _ = run.apply(arrival)
        launched = launched or found
    names = {0: 0}
    assert launched is not None
    while len(launched.decodes) < running:
        launched, _ = run.apply(completion(run, launched, names))
        assert launched is not None
    first, times = len(run.events), []
    for _ in range(num_steps):
        launched, took = run.apply(completion(run, launched, names))
        assert launched is not None
        times.append(took)
    return run.events, first, statistics.median(times) / 1000


def step_times(events: list[Event], first: int) -> list[float]:
    """Microseconds of the store for each step from event `first` on."""
    store = MetricsStore()
    for event in events[:first]:
        store.apply(event)
    steps = events[first:]
    starts = [index for index, event in enumerate(steps) if isinstance(event, StepCompleted)] + [len(steps)]
    gc.collect()
    gc.disable()
    times = []
    for begin, end in pairwise(starts):
        start = time.thread_time_ns()
        for event in steps[begin:end]:
            store.apply(event)
        times.append((time.thread_time_ns() - start) / 1000)
    gc.enable()
    return sorted(times)


async def scrape(num_replicas: int, accept: str) -> tuple[float, float, int]:
    """Milliseconds of one scrape, of the loop's longest pause in it, and its bytes; medians of 20."""
    header = make_header("fcfs", Case(256, 0), RAMP_TOKENS)
    store = MetricsStore()
    store.apply(structs.replace(header, core=structs.replace(header.core, num_replicas=num_replicas)))
    times = Histogram.over(SCHEDULING_BUCKETS_NS)
    walls, pauses, num_bytes = [], [], 0

    def read() -> EngineMetrics:
        return EngineMetrics(log=store.snapshot(), state="ready", scheduling_time=times)

    for _ in range(20):
        turns = [time.thread_time()]
        done = asyncio.Event()

        async def tick(turns: list[float] = turns, done: asyncio.Event = done) -> None:
            while not done.is_set():
                await asyncio.sleep(0)
                turns.append(time.thread_time())

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        start = time.thread_time()
        reply = await render(read(), accept)
        walls.append(time.thread_time() - start)
        done.set()
        await ticker
        pauses.append(max(later - earlier for earlier, later in pairwise(turns)))
        num_bytes = len(reply.body)
    return statistics.median(walls) * 1000, statistics.median(pauses) * 1000, num_bytes


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps to time in each case")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one process")
    print(f"{'running':>8}{'store us/step':>15}{'p99':>8}{'core us/step':>14}{'share':>8}")
    for running in (1, 32, 256, 1024):
        events, first, core_us = record_steps(running, arguments.steps)
        times = step_times(events, first)
        median, p99 = statistics.median(times), times[len(times) * 99 // 100]
        print(f"{running:>8,}{median:>15.1f}{p99:>8.1f}{core_us:>14.1f}{median / core_us:>8.1%}", flush=True)
    print(f"\n{'replicas':>8}{'format':>13}{'scrape ms':>11}{'longest pause ms':>18}{'bytes':>10}")
    for num_replicas in (1, 4, 16, 64):
        for accept, name in (("", "text"), (OPENMETRICS, "openmetrics")):
            wall, pause, num_bytes = asyncio.run(scrape(num_replicas, accept))
            print(f"{num_replicas:>8}{name:>13}{wall:>11.1f}{pause:>18.2f}{num_bytes:>10,}", flush=True)


if __name__ == "__main__":
    main()
