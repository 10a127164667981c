"""Workers die at random moments under load: is any request lost, wrong or stuck, any block leaked?

    python benchmarks/worker_kills.py [--kills 1000] [--replicas 3] [--clients 12] [--seed 1]

The real engine with real worker processes of the fake model, whose tokens follow from a request's seed, a sample's
index and the token's place alone. Workers are killed (SIGKILL), stopped so that they fall silent (SIGSTOP), and die of
themselves in the middle of steps. Clients submit one request after the other all the while; each checks that every
token comes exactly once and is the right one, and that every sequence ends by its length. In the end nothing may be
live, every pool must be empty, and the recorded trace must verify.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import structlog
import uvloop

from eventlm.config import Config, ModelConfig, RecordConfig, SchedulerConfig, WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import FinishedOutput, Request, TokensOutput
from eventlm.engine.setup import make_setup
from eventlm.events import Event, WorkerLost
from eventlm.replay.verify.verifier import verify
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import fake_token

#: Chance that a worker dies of itself in a step.
DIE_PPM = 300
#: Share of the losses caused from outside that are a stopped process.
STOPPED = 0.05
MAX_PAUSE_SECONDS = 0.25
#: No client waits longer than this for an answer.
STUCK_SECONDS = 120


class Report(NamedTuple):
    """What came of it. `problems` says what went wrong, and with which request."""

    num_losses: int
    num_requests: int
    num_tokens: int
    num_decisions: int
    length_s: float
    problems: list[str]


class Run:
    """One engine, its clients, and who kills its workers."""

    def __init__(self, folder: Path, *, num_replicas: int, seed: int) -> None:
        config = Config(
            model=ModelConfig(model="fake", fake={"die_ppm": DIE_PPM}),
            scheduler=SchedulerConfig(replicas=num_replicas, router={"type": "prefix_affinity"}),
            # No replica is to be given up because several workers in a row died before their first step.
            worker=WorkerConfig(heartbeat_timeout_seconds=1, max_restarts=100),
            record=RecordConfig(record=str(folder), validate_every=64),
        )
        self.engine = InferenceEngine(
            make_setup(config, model="fake", model_name="m", num_blocks=256, max_model_len=512), real_system()
        )
        self.rng = random.Random(seed)
        self.num_losses = 0
        self.num_requests = 0
        self.num_tokens = 0
        self.problems: list[str] = []
        self.done = False

    def count(self, event: Event) -> None:
        """Losses, by the log."""
        self.num_losses += isinstance(event, WorkerLost)

    async def kill(self, num_kills: int) -> None:
        """Until so many workers were lost."""
        while self.num_losses < num_kills and not self.problems:
            await asyncio.sleep(self.rng.uniform(0, MAX_PAUSE_SECONDS))
            pid = self.rng.choice(self._ready_pids())
            if pid:
                number = signal.SIGSTOP if self.rng.random() < STOPPED else signal.SIGKILL
                try:
                    os.kill(pid, number)
                except ProcessLookupError:  # it was faster
                    continue
        self.done = True

    def _ready_pids(self) -> list[int]:
        """Of the workers that are up; 0 for the others."""
        assert self.engine._engine_core is not None
        replicas = self.engine._engine_core.core.state.replicas
        return [pid if replica.up else 0 for pid, replica in zip(self.engine.worker_pids, replicas, strict=True)]

    async def client(self) -> None:
        """One request after the other, each checked."""
        while not self.done and not self.problems:
            request, n = self._draw_request()
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await self._check(request, n)
            except Exception as error:
                self.problems.append(f"request with seed {request.sampling.seed}: {error!r}")
            self.num_requests += 1

    def _draw_request(self) -> tuple[Request, int]:
        rng = self.rng
        prompt = [rng.randrange(4)] * rng.choice([0, 32, 128]) + [rng.randrange(256) for _ in range(rng.randint(1, 90))]
        n = rng.choice([1, 1, 2])
        params = SamplingParams(max_tokens=rng.randint(1, 120), n=n, seed=rng.getrandbits(63))
        return Request(prompt_token_ids=prompt, sampling=params, scheduling=SchedulingParams(model="m")), n

    async def _check(self, request: Request, n: int) -> None:
        (handle,) = await self.engine.submit([request])
        tokens: list[list[int]] = [[] for _ in range(n)]
        reasons: dict[int, str] = {}
        async for output in handle:
            if isinstance(output, TokensOutput):
                if output.start != len(tokens[output.index]) or output.index in reasons:
                    raise AssertionError(f"token {output.start} came after {len(tokens[output.index])}")
                tokens[output.index] += output.token_ids
            elif isinstance(output, FinishedOutput):
                reasons[output.index] = output.reason
        right = [
            [fake_token(request.sampling.noise_seed, index, position) for position in range(request.max_tokens)]
            for index in range(n)
        ]
        if reasons != dict.fromkeys(range(n), "length") or tokens != right:
            raise AssertionError(f"it ended with {reasons}, {sum(map(len, tokens))} tokens")
        self.num_tokens += sum(map(len, tokens))

    def find_leaks(self) -> None:
        """What is left when all clients have gone."""
        engine_core = self.engine._engine_core
        assert engine_core is not None
        state = engine_core.core.state
        if state.requests or len(engine_core.live):
            self.problems.append(f"requests never left: {list(state.requests)[:8]}")
        for replica in state.replicas:
            if replica.pool.num_available != replica.pool.num_blocks:
                self.problems.append(f"replica {replica.index} lacks blocks")


async def run(folder: Path, *, num_kills: int, num_replicas: int = 3, num_clients: int = 12, seed: int = 1) -> Report:
    """Kill workers under load until `num_kills` were lost, then look at what is left."""
    found = Run(folder, num_replicas=num_replicas, seed=seed)
    await found.engine.start()
    start = time.monotonic()
    found.engine.bus.attach(found.count)
    try:
        await asyncio.gather(found.kill(num_kills), *(found.client() for _ in range(num_clients)))
        length_s = time.monotonic() - start
        found.find_leaks()
    finally:
        await found.engine.stop()
    assert found.engine.run_folder is not None
    result = verify(found.engine.run_folder)
    if result.divergence is not None or not result.clean_end:
        found.problems.append(f"the trace does not verify: {result.divergence}")
    return Report(
        found.num_losses, found.num_requests, found.num_tokens, result.num_decisions, length_s, found.problems
    )


def main() -> int:
    """Print the figures; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        report = uvloop.run(
            run(
                Path(folder),
                num_kills=arguments.kills,
                num_replicas=arguments.replicas,
                num_clients=arguments.clients,
                seed=arguments.seed,
            )
        )
    print(f"{report.num_losses} workers lost in {report.length_s:.0f} s")
    print(f"{report.num_requests:,} requests with {report.num_tokens:,} tokens, {len(report.problems)} of them wrong")
    print(f"{report.num_decisions:,} decisions verified")
    print("\n".join(report.problems[:20]) or "nothing lost, doubled or stuck, no block leaked")
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
