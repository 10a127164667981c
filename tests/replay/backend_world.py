"""Runs at other servers that compute in steps and have caches of their own, which no model of replay/ knows of.

run = World(folder, shared_prefixes(seed), router="prefix_affinity").run()
"""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from eventlm.config.load import load_config
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.engine.core_loop import CoreLoop, Shell
from eventlm.events import (
    BackendState,
    Decision,
    End,
    Event,
    Fact,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    Streamed,
    Withdrawn,
)
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost
from eventlm.replay.simulate.backend_sets import backends_setup, started_backends
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.replay.simulate.engine import SimulatedSet
from eventlm.replay.simulate.simulation import simulated_header
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from tests.made_requests import make_arrival

MILLISECOND = 1_000_000
BLOCK = 16


class Traits(NamedTuple):
    """How a server computes: a step takes `step_ns`, `token_ns` for each token of prompts, of which it has at most
    `chunk`, and `decode_ns` for each answer, more or less `noise`. cache_blocks: of its prefix cache. slots: requests
    at once. fails: how many attempts do.
    """

    step_ns: int = 8 * MILLISECOND
    token_ns: int = 60_000
    decode_ns: int = 300_000
    chunk: int = 512
    noise: float = 0.05
    network_ns: int = MILLISECOND
    cache_blocks: int = 200
    slots: int = 16
    fails: float = 0.0


class _Attempt(Struct, eq=False):
    name: tuple[int, int, int]
    request: WorkloadRequest
    left: int = -1
    num_cached: int = 0
    num_tokens: int = 0


class _Server:
    def __init__(self, world: World, traits: Traits) -> None:
        self.world, self.traits = world, traits
        self.waiting: list[_Attempt] = []
        self.running: list[_Attempt] = []
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.is_stepping = False

    def take(self, attempt: _Attempt) -> None:
        self.waiting.append(attempt)
        if not self.is_stepping:
            self._step()

    def drop(self, name: tuple[int, int, int]) -> None:
        self.waiting = [each for each in self.waiting if each.name != name]
        self.running = [each for each in self.running if each.name != name]

    def _step(self) -> None:
        traits, rng = self.traits, self.world.rng
        while self.waiting and len(self.running) < traits.slots:
            attempt = self.waiting.pop(0)
            attempt.num_cached = self._look_up(attempt.request)
            attempt.left = attempt.request.arrival.prompt_tokens - attempt.num_cached
            self.running.append(attempt)
        self.is_stepping = bool(self.running)
        if not self.running:
            return
        budget, num_decodes, moves = traits.chunk, 0, []
        for attempt in self.running:
            if attempt.left <= 0:
                num_decodes += 1
                moves.append(attempt)
            elif budget:
                part = min(attempt.left, budget)
                budget, attempt.left = budget - part, attempt.left - part
                if not attempt.left:
                    moves.append(attempt)
        mean_ns = traits.step_ns + traits.token_ns * (traits.chunk - budget) + traits.decode_ns * num_decodes
        taken_ns = round(mean_ns * max(rng.gauss(1, traits.noise), 0.3))
        self.world.after(taken_ns, lambda: self._stepped(moves))

    def _stepped(self, moves: list[_Attempt]) -> None:
        rows, ends = [], []
        for attempt in moves:
            if attempt not in self.running:
                continue
            attempt.num_tokens += 1
            rows.append((*attempt.name, attempt.num_tokens))
            if attempt.num_tokens >= attempt.request.outputs[attempt.name[1]].worker_end:
                ends.append(attempt)
                self.running.remove(attempt)
        facts: list[Fact] = [Streamed(rows=rows)] if rows else []
        for attempt in ends:
            request, index, number = attempt.name
            facts.append(
                ForwardEnded(
                    request=request,
                    index=index,
                    attempt=number,
                    reason="stop",
                    num_tokens=attempt.num_tokens,
                    prompt_tokens=attempt.request.arrival.prompt_tokens,
                    cached_tokens=attempt.num_cached,
                )
            )
        self.world.after(self.traits.network_ns, lambda: self.world.put(*facts))
        self._step()

    def _look_up(self, request: WorkloadRequest) -> int:
        blocks = request.arrival.blocks
        found = next((place for place, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.traits.cache_blocks:
            self.cache.popitem(last=False)
        return min(found * BLOCK, request.arrival.prompt_tokens - 1)


class World:
    """A workload at such servers; `run` records it. options: of the engine. probes: whether servers tell their load."""

    def __init__(
        self,
        folder: Path,
        workload: Workload,
        *,
        seed: int = 0,
        num_backends: int = 4,
        traits: Traits | None = None,
        probes: bool = False,
        **options: Any,
    ) -> None:
        traits = traits or Traits()
        config = load_config(None, {"replicas": num_backends, "block_size": BLOCK} | options, environment={})
        cost = BackendsCost(backends=[BackendCost(kind="vllm", slots=0 if probes else traits.slots)])
        config = structs.replace(
            config, cache=structs.replace(config.cache, num_blocks=config.cache.num_blocks or traits.cache_blocks + 1)
        )
        setup = backends_setup(config, workload, cost, model_name="made", recorded=None)
        own = SimulatedSet(setup, [1_000_000, 1000, 0, 0, 0], cost)
        header = structs.replace(simulated_header(workload, [own]), host={})
        self.rng = random.Random(seed)
        self._workload = workload
        self._numbers: dict[int, int] = {}
        self._servers = [_Server(self, traits) for _ in range(num_backends)]
        self._replicas: dict[tuple[int, int, int], int] = {}
        self._clock = VirtualClock()
        self._trace = SimulatedTrace(folder, f"world-{seed}")
        core = Core(setup.core, setup.plugins, Predictor.from_coefficients(own.predictor))
        self.core = core
        self._loop = CoreLoop(
            core,
            self._clock,
            Shell(self._trace.see, lambda index, decisions: None, self._decided, self._trace.see, lambda: None),
            checkpoint_events=CHECKPOINT_EVENTS,
        )
        self._loop.mark(header)
        ups = started_backends([own])
        self.after(1, lambda: self.put(*ups.values()))
        for number, request in enumerate(workload.requests):
            self._clock.at(request.arrival_ns, lambda number=number: self._arrive(number))  # type: ignore[misc]
        if probes:
            for at_ns in range(50 * MILLISECOND, workload.requests[-1].arrival_ns, 100 * MILLISECOND):
                self._clock.at(at_ns, self._probe)

    def run(self) -> Path:
        """The folder of the run."""
        with self._trace:
            while self._clock.has_more:
                self._loop.drain(self._clock.advance())
            self._loop.checkpoint()
            self._loop.mark(End(reason="stop"))
        assert not self.core.state.requests
        return self._trace.run_folder

    def after(self, delay_ns: int, action: Any) -> None:
        """Do something later."""
        self._clock.at(self._clock.now_ns() + delay_ns, action)

    def put(self, *facts: Fact) -> None:
        """Tell the core now."""
        for fact in facts:
            self._loop.put_fact(fact)

    def _arrive(self, number: int) -> None:
        def make(seq: int, ts: int) -> list[Event]:
            self._numbers[seq] = number
            arrival = self._workload.requests[number].arrival
            scheduling = structs.replace(arrival.scheduling, model="made", received_ns=ts)
            return [structs.replace(arrival, scheduling=scheduling)]

        self._loop.put(make)  # type: ignore[arg-type]

    def _probe(self) -> None:
        for replica, server in enumerate(self._servers):
            self.put(BackendState(replica=replica, epoch=1, running=len(server.running), waiting=len(server.waiting)))

    def _decided(self, decision: Decision) -> None:
        self._trace.see(decision)
        match decision:
            case Forwarded(request=request, index=index, attempt=attempt, replica=replica):
                name, server = (request, index, attempt), self._servers[replica]
                self._replicas[name] = replica
                if self.rng.random() < server.traits.fails:
                    failed = ForwardFailed(request=request, index=index, attempt=attempt, kind="server", status=500)
                    self.after(20 * MILLISECOND, lambda: self.put(failed))
                else:
                    made = _Attempt(name, self._workload.requests[self._numbers[request]])
                    self.after(server.traits.network_ns, lambda: server.take(made))
            case Withdrawn(request=request, index=index, attempt=attempt, replica=replica):
                self._servers[replica].drop((request, index, attempt))
            case Finished(request=request, index=index):
                for name, replica in self._replicas.items():
                    if name[:2] == (request, index):
                        self._servers[replica].drop(name)
            case Relayed():
                pass


def shared_prefixes(
    seed: int, *, num_requests: int = 300, num_families: int = 12, per_second: float = 12.0, **fields: Any
) -> Workload:
    """Prompts of 480 to 800 tokens, of which 384 are those of their family."""
    rng = random.Random(seed)
    requests, now_ns = [], 0
    for index in range(num_requests):
        now_ns += round(rng.expovariate(per_second) * 1e9)
        prompt_tokens, family = rng.randrange(480, 800), rng.randrange(num_families)
        blocks = [1 + family * 100 + place for place in range(24)]
        blocks += [10_000 + index * 100 + place for place in range(prompt_tokens // BLOCK - 24)]
        num_tokens = rng.randrange(10, 60)
        requests.append(
            WorkloadRequest(
                arrival=make_arrival(prompt_tokens=prompt_tokens, max_tokens=200, blocks=blocks, model="", **fields),
                arrival_ns=now_ns,
                outputs=[SequenceOutput(worker_end=num_tokens, worker_reason="eos", num_tokens=num_tokens)],
            )
        )
    return Workload(source="made", requests=requests, block_size=BLOCK, first_free_name=1 << 20)
