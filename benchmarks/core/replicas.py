"""What the core costs with many replicas: `apply` of a completed step and of an arrival, against how many there are.

    python benchmarks/core/replicas.py [--replicas 10 100 1000]

Every replica is as busy as any other, with decodes of `RUNNING` sequences and two steps in flight. Steps are completed
in turn, each followed by the launch of the next; between them requests arrive, at once the last of their replica ends.
All prompts begin with the same system prompt, and go on with one of as many documents as there are replicas. Reported
are the median and the 99th percentile of one `apply`, its router included.

What a thousand replicas hold does not fit into a processor's cache, what ten hold does. The last case of each router
tells that apart: many engines of few replicas take turns, so the same memory is touched by cores that know of few.
Times are of the processor; whatever else runs on the machine takes caches away, and lengthens them.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections import deque
from typing import NamedTuple

from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.predictor import DEFAULT_COEFFICIENTS
from eventlm.engine.plugins.registry import resolve
from eventlm.events import Arrived, Fact, Header, Launched, StepCompleted, WorkerUp
from eventlm.replay.rebuild import rebuild
from eventlm.scheduling_params import SchedulingParams

BLOCK_SIZE = 16
#: Sequences that run on each replica.
RUNNING = 16
#: Blocks of the system prompt, and of each document.
SYSTEM_BLOCKS, DOCUMENT_BLOCKS = 64, 32
#: Output tokens of a sequence.
MAX_TOKENS = 64


PLUGINS = (("prefix_affinity", "fcfs"), ("least_loaded", "lrs"), ("round_robin", "fcfs"), ("pull", "fcfs"))


class Cost(NamedTuple):
    """Median and 99th percentile of one `apply`, in microseconds."""

    router: str
    policy: str
    replicas: int
    engines: int
    step_us: float
    step_p99_us: float
    arrival_us: float
    arrival_p99_us: float


class Run:
    """Feeds a core, and knows what is in flight."""

    def __init__(self, router: str, policy: str, num_replicas: int) -> None:
        plugins = [resolve("policy", {"type": policy}), resolve("batcher", {"type": "fixed"})]
        plugins.append(resolve("router", {"type": router}))
        blocks_of_one = SYSTEM_BLOCKS + DOCUMENT_BLOCKS + MAX_TOKENS // BLOCK_SIZE + 2
        header = Header(
            run="benchmark",
            unix_start_ns="0",
            code_version="0",
            core=CoreConfig(
                models=["m"],
                block_size=BLOCK_SIZE,
                num_blocks=(RUNNING + 2) * blocks_of_one,
                max_model_len=blocks_of_one * BLOCK_SIZE,
                num_replicas=num_replicas,
                max_num_seqs=RUNNING,
                max_num_batched_tokens=8192,
                max_queue_len=1_000_000,
            ),
            plugins=[plugin.record for plugin in plugins],
            predictor=list(DEFAULT_COEFFICIENTS),
        )
        self.core: Core = rebuild(header).new_core()
        self.core.apply(header)
        self.now_ns = 0
        self.num_replicas = num_replicas
        self.num_arrived = 0
        self.flying: list[deque[Launched]] = [deque() for _ in range(num_replicas)]

    def apply(self, fact: Fact) -> int:
        """The nanoseconds that it took."""
        start = time.process_time_ns()
        decisions = self.core.apply(fact)
        took = time.process_time_ns() - start
        for decision in decisions:
            if isinstance(decision, Launched):
                self.flying[decision.replica].append(decision)
        return took

    def arrive(self) -> int:
        """A request; the nanoseconds that it took."""
        document = self.num_arrived * 7 % self.num_replicas
        self.num_arrived += 1
        first = 1_000 + document * DOCUMENT_BLOCKS
        names = [*range(1, SYSTEM_BLOCKS + 1), *range(first, first + DOCUMENT_BLOCKS)]
        self.now_ns += 1_000_000
        return self.apply(
            Arrived(
                s=self.core.next_seq,
                ts=self.now_ns,
                p=1,
                prompt_tokens=len(names) * BLOCK_SIZE + 1,
                blocks=names,
                max_tokens=MAX_TOKENS,
                scheduling=SchedulingParams(model="m", offline=True),
            )
        )

    def complete(self, replica: int) -> int:
        """Its oldest step is done; the nanoseconds that it took."""
        launched = self.flying[replica].popleft()
        self.now_ns += 1_000_000
        return self.apply(
            StepCompleted(
                s=self.core.next_seq,
                ts=self.now_ns,
                c=launched.s,
                p=1,
                replica=replica,
                epoch=1,
                step=launched.step,
                start_ns=self.now_ns,
                end_ns=self.now_ns,
                produced=[1] * len(launched.decodes) + [row[4] for row in launched.chunks],
            )
        )


def measure(router: str, policy: str, num_replicas: int, num_engines: int = 1) -> Cost:
    """Fill the replicas, then time what happens on them in turn."""
    runs = [Run(router, policy, num_replicas) for _ in range(num_engines)]
    for run in runs:
        for replica in range(num_replicas):
            run.now_ns += 1_000_000
            run.apply(WorkerUp(s=run.core.next_seq, ts=run.now_ns, p=1, replica=replica, epoch=1))
    steps, arrivals = [], []
    gc.collect()
    gc.disable()
    # In the first half all get busy.
    num_steps = 2 * max(2 * MAX_TOKENS * num_replicas, 4_000 // num_engines)
    for number in range(num_steps):
        for run in runs:
            is_timed = number >= num_steps // 2
            if len(run.core.state.requests) < RUNNING * num_replicas:
                took = run.arrive()
                if is_timed:
                    arrivals.append(took)
            replica = number % num_replicas
            if run.flying[replica]:
                took = run.complete(replica)
                if is_timed:
                    steps.append(took)
    gc.enable()
    steps.sort()
    arrivals.sort()
    return Cost(
        router,
        policy,
        num_replicas,
        num_engines,
        statistics.median(steps) / 1000,
        steps[len(steps) * 99 // 100] / 1000,
        statistics.median(arrivals) / 1000,
        arrivals[len(arrivals) * 99 // 100] / 1000,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one process")
    heads = f"{'router':16}{'policy':8}{'replicas':>9}{'engines':>8}{'step us':>9}{'p99 us':>9}"
    print(f"{heads}{'arrival us':>12}{'p99 us':>9}")
    fewest, most = min(arguments.replicas), max(arguments.replicas)
    for router, policy in PLUGINS:
        for num_replicas, num_engines in [*((each, 1) for each in arguments.replicas), (fewest, most // fewest)]:
            cost = measure(router, policy, num_replicas, num_engines)
            print(
                f"{router:16}{policy:8}{num_replicas:>9,}{num_engines:>8,}{cost.step_us:>9.0f}{cost.step_p99_us:>9.0f}"
                f"{cost.arrival_us:>12.0f}{cost.arrival_p99_us:>9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
