"""What each router makes of requests that share prefixes: the same arrivals, in virtual time.

    python benchmarks/simulated/routers.py [--requests 2000] [--rate 60] [--replicas 4] [--prefixes 32]

The engine's own engine core, with fake workers whose steps cost what the formula of `FakeParameters` says, run on
a virtual clock, so the figures depend on nothing but the arguments. Requests arrive at random (Poisson); each has one
of `--prefixes` long prefixes, some oftener than others, and a tail of its own. All prefixes together fit the caches of
all replicas once, but not the cache of one.

hit rate: prompt tokens found in a cache. prefilled: prompt tokens computed. ttft: time to first token, milliseconds.
imbalance: busy time of the busiest replica over the mean. idle: share of the replicas' time in which one had nothing
to do while a request waited in a queue.
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from typing import Any, NamedTuple

from eventlm.bus.bus import Bus
from eventlm.config import Config, ModelConfig, SchedulerConfig
from eventlm.core.core import Core
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.engine.block_names import PAIRS_PER_BLOCK, BlockNames
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.plugins.registry import BUILT_IN
from eventlm.engine.request import FinishedOutput, Request, TokensOutput
from eventlm.engine.setup import EngineSetup, make_header, make_setup
from eventlm.events import Launched, WorkerUp
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.fake.tokens import FakeParameters
from eventlm.worker.protocol import StepPayload, StepResult, WorkerReady

SECOND = 1_000_000_000
#: 20 us a prompt token, 50 us a decode, 2 ms a step.
COSTS = FakeParameters(base_ns=2_000_000, prefill_token_ns=20_000, decode_ns=50_000, context_token_ns=0)


class Workload(NamedTuple):
    """Requests with shared prefixes. Lengths in tokens (those of tails in turn), `rate` in requests per second."""

    num_requests: int = 2000
    rate: float = 60
    num_prefixes: int = 32
    prefix_tokens: int = 1536
    tail_tokens: tuple[int, ...] = (64,)
    output_tokens: int = 32
    seed: int = 1


class Outcome(NamedTuple):
    """What one router made of it. Times in nanoseconds, `ttft_ns` in ascending order, the others by replica."""

    router: str
    prompt_tokens: int
    prefilled_tokens: int
    ttft_ns: list[int]
    busy_ns: list[int]
    idle_ns: list[int]
    length_ns: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed again."""
        return 1 - self.prefilled_tokens / self.prompt_tokens

    @property
    def imbalance(self) -> float:
        """1 where all replicas were busy for the same time."""
        return max(self.busy_ns) * len(self.busy_ns) / sum(self.busy_ns)


class Cluster:
    """An engine on a virtual clock. Its workers never fail."""

    def __init__(self, setup: EngineSetup) -> None:
        core = setup.core
        self.clock = VirtualClock()
        self.busy_ns = [0] * core.num_replicas
        self.idle_ns = [0] * core.num_replicas
        self.prefilled_tokens = 0
        self._free_ns = [0] * core.num_replicas
        self._runners = [
            FakeRunner(COSTS, epoch=1, block_size=core.block_size, num_blocks=core.num_blocks)
            for _ in range(core.num_replicas)
        ]
        predictor = list(DEFAULT_COEFFICIENTS)
        ready = WorkerReady(epoch=1, pid=0, model_fingerprint="fake", host={}, samples=[])
        names = BlockNames(
            b"routers", block_size=core.block_size, capacity=PAIRS_PER_BLOCK * core.num_blocks * core.num_replicas
        )
        self.engine_core = EngineCore(
            make_header(setup, "routers", 0, predictor, "default", ready, unix_start_ns=0),
            Core(core, setup.plugins, Predictor.from_coefficients(predictor)),
            LiveRequests(names, block_size=core.block_size, seed_key=b"seed", digest_key=b"digest"),
            clock=self.clock,
            bus=Bus(on_broken=_raise),
            ship=self._ship,
            on_broken=_raise_of,
        )
        for replica in range(core.num_replicas):
            self.engine_core.put_fact(WorkerUp(replica=replica, epoch=1))

    def run(self) -> None:
        """Until nothing is left to do."""
        now_ns = 0
        while self.clock.has_more:
            before_ns, now_ns = now_ns, self.clock.advance()
            self._note_idle(now_ns - before_ns)
            self.engine_core.drain(now_ns)

    def _note_idle(self, passed_ns: int) -> None:
        state = self.engine_core.core.state
        if any(len(queue) for queue in state.replicasets[0].queues):
            for replica in state.replicas:
                if not replica.in_flight:
                    self.idle_ns[replica.index] += passed_ns

    def _ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        replica = launched.replica
        done = self._runners[replica].execute(launched, payload)
        self.prefilled_tokens += launched.num_tokens - len(launched.decodes)
        start_ns = max(self.clock.now_ns(), self._free_ns[replica])
        duration_ns = sum(done.ops.values())
        end_ns = self._free_ns[replica] = start_ns + duration_ns
        self.busy_ns[replica] += duration_ns
        result = StepResult(
            epoch=1, step=launched.step, start_ns=start_ns, end_ns=end_ns, tokens=done.tokens, ends=done.ends
        )
        self.clock.at(end_ns, lambda: self.engine_core.complete(replica, result, start_ns=start_ns, end_ns=end_ns))


def _raise(handler: object, event: object, error: Exception) -> None:
    raise error


def _raise_of(requests: list[int], error: Exception) -> None:
    raise error


def draw_arrivals(workload: Workload) -> list[tuple[int, Request]]:
    """(time, request) in order of time, the same for every router."""
    rng = random.Random(workload.seed)
    prefixes = [_tokens(rng, workload.prefix_tokens) for _ in range(workload.num_prefixes)]
    # Of Zipf's kind: the most popular prefix comes about five times as often as the mean.
    weights = [1 / (index + 4) for index in range(workload.num_prefixes)]
    params = SamplingParams(max_tokens=workload.output_tokens, ignore_eos=True)
    arrivals, now_s = [], 0.0
    for number in range(workload.num_requests):
        now_s += rng.expovariate(workload.rate)
        (prefix,) = rng.choices(prefixes, weights)
        prompt = prefix + _tokens(rng, workload.tail_tokens[number % len(workload.tail_tokens)])
        arrivals.append(
            (
                int(now_s * SECOND),
                Request(prompt_token_ids=prompt, sampling=params, scheduling=SchedulingParams(model="m")),
            )
        )
    return arrivals


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(num_tokens)]


def measure(router: str, workload: Workload, *, num_replicas: int = 4, slack: float = 1.25) -> Outcome:
    """Run a workload through one router. `slack` is the size of all caches together over that of all prefixes."""
    config = Config(
        model=ModelConfig(model="fake"), scheduler=SchedulerConfig(router={"type": router}, replicas=num_replicas)
    )
    block_size = config.cache.block_size
    arrivals = draw_arrivals(workload)
    num_blocks = int(slack * workload.num_prefixes * workload.prefix_tokens / block_size / num_replicas)
    cluster = Cluster(
        make_setup(
            config,
            model="fake",
            model_name="m",
            num_blocks=num_blocks,
            max_model_len=workload.prefix_tokens + max(workload.tail_tokens) + workload.output_tokens,
        )
    )
    ttft_ns: list[int] = []
    num_finished = 0

    def submit(request: Request) -> None:
        arrived_ns, waits = cluster.clock.now_ns(), True

        def listen(output: Any) -> None:
            nonlocal num_finished, waits
            if isinstance(output, TokensOutput) and waits:
                waits = False
                ttft_ns.append(cluster.clock.now_ns() - arrived_ns)
            num_finished += isinstance(output, FinishedOutput)

        cluster.engine_core.submit([(request, listen)], lambda reason, seqs: None)

    cluster.clock.at(0, lambda: None)
    for time_ns, request in arrivals:
        cluster.clock.at(time_ns, partial(submit, request))
    cluster.run()
    assert num_finished == len(ttft_ns) == workload.num_requests
    return Outcome(
        router,
        sum(len(request.prompt_token_ids) for _, request in arrivals),
        cluster.prefilled_tokens,
        sorted(ttft_ns),
        cluster.busy_ns,
        cluster.idle_ns,
        cluster.clock.now_ns(),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=60, help="requests per second")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=32)
    arguments = parser.parse_args()
    workload = Workload(num_requests=arguments.requests, rate=arguments.rate, num_prefixes=arguments.prefixes)
    print(f"{arguments.replicas} replicas, {workload}")
    print(f"{'router':17}{'hit rate':>9}{'prefilled':>11}{'ttft p50':>10}{'p99':>8}{'imbalance':>11}{'idle':>8}")
    for router in BUILT_IN["router"]:
        found = measure(router, workload, num_replicas=arguments.replicas)
        p50, p99 = (found.ttft_ns[len(found.ttft_ns) * percent // 100] / 1e6 for percent in (50, 99))
        idle = sum(found.idle_ns) / found.length_ns / arguments.replicas
        print(
            f"{router:17}{found.hit_rate:>9.1%}{found.prefilled_tokens:>11,}{p50:>10.1f}{p99:>8.1f}"
            f"{found.imbalance:>11.2f}{idle:>8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
