"""Random workloads in virtual time: the real driver, core and fake workers, with everything that may go wrong.

A workload is a seed. Its machine (pool, limits, depth, replicas, plug-ins) and its life (arrivals in groups, cancels,
late text ends, grammars, dying workers, pauses, swaps) are drawn from it, so a run is (seed, commit). The tokens that
each sequence must end with do not depend on any of that: `expected_outcome` computes them from the request alone.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from eventlm.bus.bus import Bus
from eventlm.config import CoreConfig
from eventlm.control.block_names import PAIRS_PER_BLOCK, BlockNames
from eventlm.control.driver import Driver
from eventlm.control.live_requests import LiveRequests
from eventlm.control.plugins import resolve
from eventlm.control.request import ClosingOutput, EngineRequest, FinishedOutput, TokensOutput
from eventlm.core.core import Core
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state import Plugins
from eventlm.core.validate import validate, validate_liveness
from eventlm.events import (
    Arrived,
    Cancelled,
    Desynced,
    Event,
    FrontEndLost,
    Header,
    Launched,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Resumed,
    TimerDue,
    WorkerLost,
    WorkerUp,
)
from eventlm.sampling_params import SamplingParams
from eventlm.worker.fake import ENDS, EOS_TOKEN_ID, MILLION, FakeDeath, FakeParameters, FakeRunner, draw, fake_token
from eventlm.worker.protocol import StepPayload, StepResult, decode_to_worker, encode

POLICIES = ("fcfs", "edf", "lrs")
BATCHERS = ("fixed", "dynamic")
ROUTERS = ("round_robin", "pull", "least_loaded")
MILLISECOND = 1_000_000


class Machine(NamedTuple):
    """What a workload runs on."""

    core: CoreConfig
    policies: list[dict[str, Any]]
    batcher: dict[str, Any]
    router: dict[str, Any]
    fake: FakeParameters


class Outcome(NamedTuple):
    """How a sequence ended."""

    reason: str
    tokens: tuple[int, ...]


class Chaos(NamedTuple):
    """Chances of what goes wrong, each per request or per workload."""

    cancels: float = 0.1
    kills: int = 2
    text_ends: float = 0.4
    max_text_delay_ns: int = 5 * 4 * MILLISECOND


def draw_machine(rng: random.Random, seed: int) -> Machine:
    """Every policy x batcher x router comes up in 18 consecutive seeds."""
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.choice([9, 14, 24, 60, 200])
    core = CoreConfig(
        models=["fake"],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=(num_blocks - 1) * block_size,
        num_replicas=rng.choice([1, 1, 2, 3]),
        max_num_seqs=rng.choice([1, 2, 4, 8, 32]),
        max_num_batched_tokens=rng.choice([4, 8, 16, 64]),
        max_queue_len=rng.choice([4, 20, 1000]),
        max_steps_in_flight=rng.choice([1, 2, 3, 4]),
        max_decodes_in_flight_per_seq=rng.choice([1, 2, 3]),
        max_tokens_per_row=rng.choice([1, 1, 2, 4]),
        max_skips=rng.choice([0, 1, 4]),
        max_evictions=rng.choice([0, 1, 2]),
    )
    policies = [
        {"type": "fcfs"},
        {"type": "edf", "evict_margin_ms": rng.choice([0, 5, 10_000]), "min_deadline_ms": rng.choice([1, 50])},
        {"type": "lrs", "evict_margin": rng.choice([0, 0.5, 8]), "min_deadline_ms": rng.choice([1, 50])},
    ]
    first = seed % 3
    policies = policies[first:] + policies[:first]
    batcher: dict[str, Any] = {"type": BATCHERS[seed // 3 % 2]}
    if batcher["type"] == "dynamic":
        batcher |= {"target_ms": rng.choice([1, 4, 20]), "min_chunk_tokens": rng.choice([1, 4])}
    fake = FakeParameters(
        end_ppm=rng.choice([0, 30_000, 200_000]),
        late_ppm=rng.choice([0, 50_000]),
        die_ppm=rng.choice([0, 0, 4_000]),
    )
    return Machine(core, policies, batcher, {"type": ROUTERS[seed // 6 % 3]}, fake)


def make_core(machine: Machine) -> tuple[Header, Core]:
    """The header of a run on this machine, and a core as it describes."""
    policies = [resolve("policy", spec) for spec in machine.policies]
    batcher, router = resolve("batcher", machine.batcher), resolve("router", machine.router)
    header = Header(
        run="simulation",
        unix_start_ns="0",
        code_version="0",
        core=machine.core,
        plugins=[*(policy.record for policy in policies), batcher.record, router.record],
        predictor=list(DEFAULT_COEFFICIENTS),
    )
    plugins = Plugins(
        policies={policy.record.name: policy.instance for policy in policies},
        policy=policies[0].record.name,
        batcher=batcher.instance,
        router=router.instance,
    )
    return header, Core(machine.core, plugins, Predictor.from_coefficients(DEFAULT_COEFFICIENTS))


def draw_request(rng: random.Random, machine: Machine, chaos: Chaos) -> EngineRequest:
    """A request that fits the context; some share prefixes."""
    context = machine.core.max_model_len
    prompt_tokens = rng.randint(1, max(1, min(context - 1, rng.choice([6, 20, context - 1]))))
    shared = [7] * prompt_tokens if rng.random() < 0.5 else [rng.randrange(256) for _ in range(prompt_tokens)]
    kind: Any = rng.choice(["generate"] * 8 + ["score", "pool"])
    return EngineRequest(
        model="fake",
        prompt_token_ids=shared,
        params=SamplingParams(max_tokens=rng.randint(1, max(1, min(context - prompt_tokens, 24)))),
        kind=kind,
        n=rng.choice([1, 1, 1, 2, 3]) if kind == "generate" else 1,
        seed=rng.getrandbits(64) if rng.random() < 0.8 else None,
        skip_cache_read=rng.random() < 0.1,
        priority=rng.choice([0, 0, 0, -1, 3]),
        deadline_ns=rng.choice([0, 0, 5, 200]) * MILLISECOND,
        drop_if_late=rng.random() < 0.2,
        has_text_ends=rng.random() < chaos.text_ends and kind == "generate",
        offline=rng.random() < 0.2,
        front_end=rng.choice([0, 0, 0, 1]),
    )


def text_end_position(seed: int, index: int) -> int:
    """Where the edge will find an end in a text that may have one; most are never reached."""
    return 1 + draw("text", seed, index) % 40


def expected_outcome(request: EngineRequest, seed: int, index: int, fake: FakeParameters) -> Outcome:
    """How a sequence ends if nobody cuts it short: a function of the request alone."""
    if request.kind != "generate":
        return Outcome("complete", ())
    tokens: list[int] = []
    reason = "length"
    while len(tokens) < request.params.max_tokens:
        drawn = draw("end", seed, index, len(tokens)) % MILLION
        if drawn < fake.end_ppm:
            tokens.append(EOS_TOKEN_ID)
            reason = ENDS[drawn % len(ENDS)]
            break
        tokens.append(fake_token(seed, index, len(tokens)))
    if request.has_text_ends and text_end_position(seed, index) <= len(tokens):
        return Outcome("stop", tuple(tokens[: text_end_position(seed, index)]))
    return Outcome(reason, tuple(tokens))


class MemoryLog:
    """A log writer that keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def append(self, body: bytes) -> None:
        self.bodies.append(body)

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Client:
    """The edge of one request: collects its outputs and owes the ends of its texts."""

    def __init__(self, simulation: Simulation, request: EngineRequest) -> None:
        self.simulation = simulation
        self.request = request
        self.seq = -1
        self.rejected: str | None = None
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self.outcomes: dict[int, Outcome] = {}
        self._answered: set[int] = set()

    def __call__(self, output: Any) -> None:
        index = output.index
        assert index not in self.outcomes, "an output behind the last"
        if isinstance(output, TokensOutput):
            assert output.start == len(self.tokens[index])
            self.tokens[index] += output.token_ids
            end = text_end_position(self.seed, index)
            if self.request.has_text_ends and len(self.tokens[index]) >= end:
                self._answer(index, end, "stop")
        elif isinstance(output, ClosingOutput):
            assert output.position == len(self.tokens[index])
            self._answer(index, output.position, "")
        elif isinstance(output, FinishedOutput):
            self.outcomes[index] = Outcome(output.reason, tuple(self.tokens[index][: output.position]))

    @property
    def seed(self) -> int:
        """The seed in force, drawn by the engine if the request brought none."""
        return self.simulation.seeds[self.seq]

    def _answer(self, index: int, position: int, reason: str) -> None:
        if index in self._answered:
            return
        self._answered.add(index)
        self.simulation.after(
            self.simulation.text_delay(), lambda: self.simulation.driver.end_text(self.seq, index, position, reason)
        )


class VirtualWorker:
    """A replica's worker process in virtual time: a fake runner that does one step after the other."""

    def __init__(self, simulation: Simulation, replica: int) -> None:
        self.simulation = simulation
        self.replica = replica
        self.epoch = 0
        self.runner: FakeRunner | None = None
        self.free_ns = 0

    def start(self) -> None:
        """Come up with a new epoch and an empty cache."""
        core = self.simulation.machine.core
        self.epoch += 1
        self.runner = FakeRunner(
            self.simulation.machine.fake, epoch=self.epoch, block_size=core.block_size, num_blocks=core.num_blocks
        )
        self.free_ns = self.simulation.now_ns
        self.simulation.driver.put_fact(WorkerUp(replica=self.replica, epoch=self.epoch))

    def step(self, launched: Launched, payload: StepPayload) -> None:
        """Take a step; its result comes when it is done. Dead workers say nothing."""
        if self.runner is None or launched.epoch != self.epoch:
            return
        start_ns = max(self.simulation.now_ns, self.free_ns)
        try:
            done = self.runner.execute(launched, payload)
        except FakeDeath:
            self.runner = None
            self.simulation.after(MILLISECOND, lambda epoch=self.epoch: self.report_lost(epoch))
            return
        self.free_ns = start_ns + done.duration_ns
        result = StepResult(
            epoch=launched.epoch,
            step=launched.step,
            start_ns=start_ns,
            end_ns=self.free_ns,
            tokens=done.tokens,
            ends=done.ends,
        )
        self.simulation.at(self.free_ns, lambda: self._report(result))

    def _report(self, result: StepResult) -> None:
        if self.runner is not None and result.epoch == self.epoch:
            self.simulation.driver.complete(self.replica, result, start_ns=result.start_ns, end_ns=result.end_ns)

    def kill(self) -> None:
        """Die between or in the middle of steps."""
        if self.runner is not None:
            self.runner = None
            self.report_lost(self.epoch)

    def report_lost(self, epoch: int) -> None:
        """The engine has noticed; another worker starts a little later."""
        simulation = self.simulation
        simulation.driver.live.forget_worker(self.replica)
        if simulation.rng.random() < 0.3:
            simulation.driver.put_fact(Desynced(replica=self.replica, epoch=epoch, step=0))
        simulation.driver.put_fact(WorkerLost(replica=self.replica, epoch=epoch, reason="killed"))
        simulation.after(simulation.rng.randint(1, 20) * MILLISECOND, self.start)


class Simulation:
    """One workload. `run` returns when everything has ended; it raises if anything cannot."""

    def __init__(
        self,
        seed: int,
        *,
        num_requests: int = 24,
        chaos: Chaos | None = None,
        machine: Machine | None = None,
        text_delay_seed: int = 0,
        writer: Any = None,
        check: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.machine = machine or draw_machine(self.rng, seed)
        self.chaos = chaos or Chaos()
        self.num_requests = num_requests
        self.now_ns = 0
        self.clients: list[Client] = []
        self.seeds: dict[int, int] = {}
        self.check = check
        self._text_rng = random.Random(f"{seed}/{text_delay_seed}")
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._num_entries = 0
        self._armed_ns = -1
        self.log = writer or MemoryLog()
        header, core = make_core(self.machine)
        size = self.machine.core.block_size
        names = BlockNames(b"names", block_size=size, capacity=PAIRS_PER_BLOCK * self.machine.core.num_blocks)
        live = LiveRequests(names, block_size=size, seed_key=b"seeds", digest_key=b"digests")
        bus = Bus()
        bus.attach(self._learn_seed)
        self.driver = Driver(
            header, core, live, bus=bus, ship=self._ship, writer=self.log, checkpoint_events=50, validate_every=0
        )
        self.workers = [VirtualWorker(self, replica) for replica in range(self.machine.core.num_replicas)]
        if check:
            self._apply, core.apply = core.apply, self._checked_apply  # type: ignore[method-assign]

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time; ties in the order of asking."""
        heapq.heappush(self._agenda, (max(time_ns, self.now_ns), self._num_entries, action))
        self._num_entries += 1

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now_ns + delay_ns, action)

    def text_delay(self) -> int:
        """How late the edge looks at a text: up to five steps."""
        return self._text_rng.randint(0, self.chaos.max_text_delay_ns) if self.chaos.max_text_delay_ns else 0

    def run(self) -> dict[tuple[int, int], Outcome]:
        """Outcomes by (client, index); rejected requests have none."""
        self._plan_life()
        while self._agenda:
            self.now_ns = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] <= self.now_ns:
                heapq.heappop(self._agenda)[2]()
            self.driver.drain(self.now_ns)
            self._arm_timer()
        self.driver.end("stop")
        self._check_end()
        return {
            (place, index): outcome
            for place, client in enumerate(self.clients)
            for index, outcome in sorted(client.outcomes.items())
        }

    def _plan_life(self) -> None:
        rng = self.rng
        for worker in self.workers:
            self.at(rng.randint(0, 10) * MILLISECOND, worker.start)
        last_ns = 0
        while len(self.clients) < self.num_requests:
            last_ns += rng.choice([0, 1, 5, 30]) * MILLISECOND
            group = [self._make_client() for _ in range(rng.choice([1, 1, 1, 2, 4]))]
            self.at(last_ns, lambda group=group: self._arrive(group))
            for client in group:
                if rng.random() < self.chaos.cancels:
                    self.at(last_ns + rng.randint(0, 60) * MILLISECOND, lambda client=client: self._cancel(client))
        for _ in range(rng.randint(0, self.chaos.kills)):
            worker = rng.choice(self.workers)
            self.at(rng.randint(0, last_ns + 1), worker.kill)
        if self.chaos.kills:
            self._plan_swaps(last_ns)

    def _plan_swaps(self, last_ns: int) -> None:
        rng, driver = self.rng, self.driver
        when = rng.randint(0, last_ns + 1)
        name = rng.choice(POLICIES)
        coefficients = [value * rng.randint(1, 3) for value in DEFAULT_COEFFICIENTS]
        actions: list[Callable[[], None]] = [
            lambda: driver.put_fact(PolicySwapped(name=name)),
            lambda: driver.put_fact(PredictorSwapped(coefficients=coefficients)),
            lambda: driver.put_fact(Paused()),
            lambda: driver.put_fact(FrontEndLost(front_end=1)),
        ]
        for action in actions:
            if rng.random() < 0.15:
                self.at(when, action)
        self.at(when + 30 * MILLISECOND, lambda: driver.put_fact(Resumed()))

    def _make_client(self) -> Client:
        client = Client(self, draw_request(self.rng, self.machine, self.chaos))
        self.clients.append(client)
        return client

    def _arrive(self, group: list[Client]) -> None:
        def admitted(reason: str | None, seqs: list[int]) -> None:
            for client, seq in zip(group, seqs, strict=True):
                client.seq = seq
                client.rejected = reason

        self.driver.submit([(client.request, client) for client in group], admitted)

    def _learn_seed(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self.seeds[event.s] = int(event.seed)

    def _cancel(self, client: Client) -> None:
        if client.seq >= 0:
            self.driver.put_fact(Cancelled(request=client.seq))

    def _ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        sent = decode_to_worker(encode(payload))
        assert isinstance(sent, StepPayload)
        self.workers[launched.replica].step(launched, sent)

    def _arm_timer(self) -> None:
        due_ns = self.driver.core.next_timer_ns
        if due_ns is not None and due_ns != self._armed_ns:
            self._armed_ns = due_ns
            self.at(due_ns, lambda: self.driver.put_fact(TimerDue(due_ns=self.now_ns)))

    def _checked_apply(self, event: Any) -> Any:
        decisions = self._apply(event)
        validate(self.driver.core.state)
        if getattr(event, "p", 0):
            validate_liveness(self.driver.core.state)
        return decisions

    def _check_end(self) -> None:
        state = self.driver.core.state
        assert not state.requests, f"{len(state.requests)} requests never ended: {list(state.requests)[:5]}"
        assert len(self.driver.live) == 0
        for replica in state.replicas:
            assert replica.pool.num_available == replica.pool.num_blocks, "blocks leaked"
        for client in self.clients:
            if client.rejected is None and client.seq >= 0:
                assert len(client.outcomes) == client.request.n, "a sequence without an end"
