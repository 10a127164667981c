"""What the metrics cost: in the drain, in memory, and at a scrape.

    python benchmarks/metrics_store.py [--steps 400] [--requests 100000]

Three tables. The store's time for the events of one step (a completion, its emit, the next launch), against that of the
core for the same step, for one replica with `running` decodes. The store's objects after more and more requests, which
must stay the same. And a scrape of /metrics: how long it takes, and for how long at most it keeps the loop from
anything else. All times are CPU time of the one thread, so that neighbours on the machine disturb them less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from core_throughput import PROMPT_TOKENS, Run, completion, make_header
from msgspec import structs

from eventlm.control.metrics import MetricsStore
from eventlm.control.metrics_aggregates import Histogram
from eventlm.control.metrics_components import SCHEDULING_BUCKETS_NS, EngineMetrics
from eventlm.events import (
    Admitted,
    Arrived,
    Emitted,
    Event,
    Finished,
    Launched,
    StepCompleted,
    WorkerUp,
)
from eventlm.server.metrics import OPENMETRICS, render


def record_steps(running: int, num_steps: int) -> tuple[list[Event], int, float]:
    """Events of a machine that is full and then makes steps; where those begin; the core's median us a step."""
    run = Run(make_header("fcfs", running))
    launched, _ = run.apply(WorkerUp(**run.next(), replica=0, epoch=1))
    for _ in range(running):
        arrival = Arrived(**run.next(), model="m", prompt_tokens=PROMPT_TOKENS, max_tokens=1024, offline=True)
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
    starts = [place for place, event in enumerate(steps) if isinstance(event, StepCompleted)] + [len(steps)]
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


def short_requests(num_requests: int) -> Iterator[Event]:
    """Requests of one prompt token and two output tokens, one after the other."""
    yield make_header("fcfs", 8)
    yield WorkerUp(s=1, ts=1, replica=0, epoch=1, p=1)
    for number in range(num_requests):
        s, step = 2 + 9 * number, 2 * number
        ts = s * 1_000_000
        yield Arrived(s=s, ts=ts, model="m", prompt_tokens=1, max_tokens=2, p=1)
        yield Admitted(s=s + 1, ts=ts, c=s, request=s)
        for place in (0, 1):
            rows = {"chunks": [(s, 0, 0, 1, 1)], "blocks": [(0, 0, [0])]} if place == 0 else {"decodes": [(s, 0, 2, 0)]}
            behind, now = s + 2 + 3 * place, ts + place * 2_000_000
            yield Launched(
                s=behind, ts=now, replica=0, epoch=1, step=step + place, num_tokens=1, predicted_ns=1, **rows
            )
            now += 2_000_000
            done = {"start_ns": now - 1_500_000, "end_ns": now - 100_000, "produced": [1], "p": 1}
            yield StepCompleted(s=behind + 1, ts=now, c=behind, replica=0, epoch=1, step=step + place, **done)
            yield Emitted(s=behind + 2, ts=now, replica=0, step=step + place, num_tokens=1)
        yield Finished(s=s + 8, ts=now, request=s, index=0, reason="length", position=2)


def num_objects(store: MetricsStore) -> int:
    """Objects reachable from the store, code aside."""
    seen: set[int] = set()
    pending: list[object] = [vars(store)]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        pending += gc.get_referents(item)
    return len(seen)


async def scrape(num_replicas: int, accept: str) -> tuple[float, float, int]:
    """Milliseconds of one scrape, of the loop's longest pause in it, and its bytes; medians of 20."""
    header = make_header("fcfs", 256)
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
        reply = await render(read, accept)
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
    parser.add_argument("--requests", type=int, default=100_000, help="requests that the memory is measured over")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one process")
    print(f"{'running':>8}{'store us/step':>15}{'p99':>8}{'core us/step':>14}{'share':>8}")
    for running in (1, 32, 256, 1024):
        events, first, core_us = record_steps(running, arguments.steps)
        times = step_times(events, first)
        median, p99 = statistics.median(times), times[len(times) * 99 // 100]
        print(f"{running:>8,}{median:>15.1f}{p99:>8.1f}{core_us:>14.1f}{median / core_us:>8.1%}", flush=True)
    print(f"\n{'requests':>9}{'objects':>9}{'us/request':>12}")
    for num_requests in (arguments.requests // 100, arguments.requests // 10, arguments.requests):
        store = MetricsStore()
        events = short_requests(num_requests)
        start = time.thread_time()
        for event in events:
            store.apply(event)
        per_request = (time.thread_time() - start) / num_requests * 1e6
        print(f"{num_requests:>9,}{num_objects(store):>9,}{per_request:>12.1f}", flush=True)
    print(f"\n{'replicas':>8}{'format':>13}{'scrape ms':>11}{'longest pause ms':>18}{'bytes':>10}")
    for num_replicas in (1, 4, 16, 64):
        for accept, name in (("", "text"), (OPENMETRICS, "openmetrics")):
            wall, pause, num_bytes = asyncio.run(scrape(num_replicas, accept))
            print(f"{num_replicas:>8}{name:>13}{wall:>11.1f}{pause:>18.2f}{num_bytes:>10,}", flush=True)


if __name__ == "__main__":
    main()
