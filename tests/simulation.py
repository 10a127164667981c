"""Random workloads in virtual time: the real engine core and fake workers, with everything that may go wrong.

`tests.workload` says what is drawn from a seed; here it is run. While it runs, the state is validated after every
event, and `tests.bounds` watches the events go by.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from msgspec import UNSET, structs

from eventlm.bus.bus import Bus
from eventlm.bus.recorder import Recorder
from eventlm.core.core import Core
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.engine.block_names import PAIRS_PER_BLOCK, BlockNames
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.live_requests import LiveRequests, ServedModel
from eventlm.engine.request import ClosingOutput, FinishedOutput, Request, TextOutput, TokensOutput
from eventlm.engine.request_spool import RequestSpool
from eventlm.events import (
    Arrived,
    CacheFlushed,
    Cancelled,
    Event,
    FrontEndLost,
    GrammarReady,
    Header,
    Launched,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Preempted,
    Recovered,
    Resumed,
)
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.worker.fake.tokens import draw
from eventlm.worker.protocol import StepPayload, decode_to_worker, encode
from tests.bounds import EvictionBounds
from tests.virtual_backend import VirtualBackend, VirtualForwarder
from tests.virtual_worker import VirtualWorker
from tests.workload import (
    COEFFICIENTS,
    MILLISECOND,
    POLICIES,
    Chaos,
    Machine,
    Outcome,
    draw_machine,
    draw_request,
    is_expected,
    make_core,
    text_end_position,
)

#: A run with a token log is for a LogWriter with this key.
DIGEST_KEY = b"digests"


def with_tokens(header: Header, machine: Machine, run: str) -> Header:
    """The header of a run that has a token log and can be run again."""
    return structs.replace(
        header,
        run=run,
        level="tokens",
        model_fingerprint="fake",
        config={
            "model": {"model": "fake", "fake": structs.asdict(machine.fake)},
            "replicasets": {each.core.models[0]: {"fake": structs.asdict(each.fake)} for each in machine.others},
        },
        replicasets=[structs.replace(each, model_fingerprint="fake") for each in header.replicasets or []] or UNSET,
    )


class MemoryLog:
    """A log writer that keeps the bodies."""

    segment_due = False
    problem = ""

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

    def __init__(self, simulation: Simulation, request: Request, machine: Machine) -> None:
        self.simulation = simulation
        self.request = request
        #: Of the replicaset that it is for.
        self.machine = machine
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
            if self.request.scheduling.has_text_ends and len(self.tokens[index]) >= end:
                self._answer(index, end, "stop")
        elif isinstance(output, TextOutput):
            assert output.start == len(self.tokens[index])
            assert output.delta.embedding or len(output.delta.text) == len(output.delta.token_ids)
            self.tokens[index] += output.delta.token_ids
        elif isinstance(output, ClosingOutput):
            assert output.position == len(self.tokens[index])
            self._answer(index, output.position, "")
        elif isinstance(output, FinishedOutput):
            self.outcomes[index] = Outcome(output.reason, tuple(self.tokens[index][: output.position]))

    def begin_again(self) -> None:
        """Forget what came: all of it comes once more."""
        self.tokens = [[] for _ in self.tokens]
        self.outcomes.clear()
        self._answered.clear()

    @property
    def seed(self) -> int:
        """The seed in force, drawn by the engine if the request brought none."""
        return self.simulation.seeds[self.seq]

    def _answer(self, index: int, position: int, reason: str) -> None:
        if index in self._answered:
            return
        self._answered.add(index)
        self.simulation.after(
            self.simulation.text_delay(),
            lambda: self.simulation.engine_core.end_text(self.seq, index, position, reason),
        )


class Simulation:
    """One workload. `run` returns when everything has ended; it raises if anything cannot."""

    def __init__(
        self,
        seed: int,
        *,
        num_requests: int = 24,
        chaos: Chaos | None = None,
        machine: Machine | None = None,
        max_queue_len: int | None = None,
        text_delay_seed: int = 0,
        writer: Any = None,
        recorder: Recorder | None = None,
        check_every: int = 1,
        records_tokens: bool = False,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.machine = machine or draw_machine(self.rng, seed)
        if max_queue_len is not None:
            core = structs.replace(self.machine.core, max_queue_len=max_queue_len)
            self.machine = self.machine._replace(core=core)
        self.chaos = chaos or Chaos()
        first, *others = [
            each._replace(fake=structs.replace(each.fake, poison_ppm=self.chaos.poison_ppm))
            for each in self.machine.sets
        ]
        self.machine = first._replace(others=tuple(others))
        self.num_requests = num_requests
        self.clock = VirtualClock()
        self.clients: list[Client] = []
        self.seeds: dict[int, int] = {}
        #: The state is validated after every so many events; 0: nothing is checked.
        self.check_every = check_every
        self._text_rng = random.Random(f"{seed}/{text_delay_seed}")
        self._num_applied = 0
        self.log = writer or MemoryLog()
        self.recorder = recorder or Recorder(self.log)
        header, core = make_core(self.machine)
        if records_tokens:
            header = with_tokens(header, self.machine, self.recorder.writer.run_folder.name)
        size, first_replica = self.machine.core.block_size, 0
        served: list[ServedModel] = []
        for before, other in pairwise(self.machine.sets):
            first_replica += before.core.num_replicas
            served.append(ServedModel(other.core.models, _names(other), other.core.block_size, 0, first_replica))
        live = LiveRequests(
            _names(self.machine), block_size=size, seed_key=b"seeds", digest_key=DIGEST_KEY, others=served
        )
        machines = [each for each in self.machine.sets for _ in range(each.core.num_replicas)]
        backends = {
            replica: VirtualBackend(self, replica, each.backends)
            for replica, each in enumerate(machines)
            if each.core.forwards is not UNSET
        }
        self._forwarder = VirtualForwarder(backends)
        self.engine_core = self.connect(header, core, live)
        self.workers = [
            backends.get(replica) or VirtualWorker(self, replica, each) for replica, each in enumerate(machines)
        ]

    def connect(self, header: Header, core: Core, live: LiveRequests, spool: RequestSpool | None = None) -> EngineCore:
        """An engine core with all that is around it here."""
        bus = Bus(next_s=core.next_seq, on_broken=_raise)
        bus.attach(self._learn_seed)
        engine_core = EngineCore(
            header,
            core,
            live,
            clock=self.clock,
            bus=bus,
            ship=self._ship,
            on_broken=_raise_of,
            recorder=self.recorder,
            checkpoint_events=50,
            validate_every=0,
            forwarder=self._forwarder,
            spool=spool,
        )
        if self.check_every:
            bus.attach(EvictionBounds([(each.core, each.policies) for each in self.machine.sets]).watch)
            self._decide, core.state.decide = core.state.decide, self._checked_decide  # type: ignore[method-assign]
            self._apply, core.apply = core.apply, self._checked_apply  # type: ignore[method-assign]
        return engine_core

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self.clock.now_ns()

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time, or now if that has passed; ties in the order of asking."""
        self.clock.at(max(time_ns, self.now_ns), action)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now_ns + delay_ns, action)

    def text_delay(self) -> int:
        """How late the edge looks at a text: up to five steps."""
        return self._text_rng.randint(0, self.chaos.max_text_delay_ns) if self.chaos.max_text_delay_ns else 0

    def run(self) -> dict[tuple[int, int], Outcome]:
        """Outcomes by (client, index); rejected requests have none."""
        self._plan_life()
        while self.clock.has_more:
            self.advance()
        self.engine_core.end("stop")
        self._check_end()
        return {
            (position, index): outcome
            for position, client in enumerate(self.clients)
            for index, outcome in sorted(client.outcomes.items())
        }

    def advance(self) -> None:
        """Drain what the next moment brings."""
        self.engine_core.drain(self.clock.advance())
        self.recorder.settle()

    def _plan_life(self) -> None:
        rng = self.rng
        for worker in self.workers:
            self.at(rng.randint(0, 10) * MILLISECOND, worker.start)
        last_ns = 0
        while len(self.clients) < self.num_requests:
            last_ns += rng.choice([0, 1, 5, 30]) * MILLISECOND
            # What comes together is for one model.
            machine = rng.choice(self.machine.sets) if self.machine.others else self.machine
            group = [self._make_client(machine) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
            self.at(last_ns, lambda group=group: self._arrive(group))
            for client in group:
                if rng.random() < self.chaos.cancels:
                    self.at(last_ns + rng.randint(0, 60) * MILLISECOND, lambda client=client: self._cancel(client))
        for _ in range(rng.randint(0, self.chaos.kills)):
            worker = rng.choice(self.workers)
            self.at(rng.randint(0, last_ns + 1), worker.kill)
        if self.chaos.kills:
            self._plan_swaps(last_ns)
        for number in range(self.chaos.recoveries):
            # Nothing else that is drawn depends on it.
            due_ns = draw("recovery", self.seed, number) % (last_ns + 1)
            self.at(due_ns, self.recover)

    def recover(self) -> None:
        """The engine dies, and with it all that it has under way. Another one goes on, and its workers come later."""
        since_ns = self.now_ns - self.engine_core.core.state.now_ns
        self.engine_core.put_fact(Recovered(reason="killed", down_ns=max(since_ns // 2, 0)))
        for worker in self.workers:
            worker.orphan()
            self.after(draw("restart", self.seed, worker.replica) % 20 * MILLISECOND, worker.start)

    def _plan_swaps(self, last_ns: int) -> None:
        rng = self.rng
        when = rng.randint(0, last_ns + 1)
        name = rng.choice(POLICIES)
        coefficients = [value * rng.randint(1, 3) for value in COEFFICIENTS]
        actions: list[Callable[[], None]] = [
            lambda: self.engine_core.put_fact(PolicySwapped(name=name)),
            lambda: self.engine_core.put_fact(PredictorSwapped(coefficients=coefficients)),
            lambda: self.engine_core.put_fact(Paused()),
            lambda: self.engine_core.put_fact(FrontEndLost(front_end=1)),
        ]
        for action in actions:
            if rng.random() < 0.2:
                self.at(when, action)
        self.at(when + 30 * MILLISECOND, lambda: self.engine_core.put_fact(Resumed()))
        if when % 7 == 0:
            self.at(when + 10 * MILLISECOND, lambda: self.engine_core.put_fact(CacheFlushed()))

    def _make_client(self, machine: Machine) -> Client:
        client = Client(self, draw_request(self.rng, machine, self.chaos), machine)
        self.clients.append(client)
        return client

    def _arrive(self, group: list[Client]) -> None:
        def admitted(reason: str | None, seqs: list[int]) -> None:
            for client, seq in zip(group, seqs, strict=True):
                client.seq = seq
                client.rejected = reason
                if reason is None and client.request.scheduling.waits_for_grammar:
                    self._build_grammar(seq)

        self.engine_core.submit([(client.request, client) for client in group], admitted)

    def _build_grammar(self, seq: int) -> None:
        rng = self.rng
        error = "no such rule" if rng.random() < self.chaos.bad_grammars else ""
        self.after(
            rng.randint(0, 20) * MILLISECOND, lambda: self.engine_core.put_fact(GrammarReady(request=seq, error=error))
        )

    def _learn_seed(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self.seeds[event.s] = int(event.seed)

    def _cancel(self, client: Client) -> None:
        if client.seq >= 0:
            self.engine_core.put_fact(Cancelled(request=client.seq))

    def _ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        sent = decode_to_worker(encode(payload))
        assert isinstance(sent, StepPayload)
        worker = self.workers[launched.replica]
        assert isinstance(worker, VirtualWorker)
        worker.step(launched, sent)

    def _checked_apply(self, event: Any) -> Any:
        decisions = self._apply(event)
        self._num_applied += 1
        if self._num_applied % self.check_every == 0:
            validate(self.engine_core.core.state)
        if getattr(event, "p", 0):
            validate_liveness(self.engine_core.core.state)
        return decisions

    def _checked_decide(self, kind: Any, /, **fields: Any) -> Any:
        """Of the residents the most urgent is never preempted for want of memory."""
        state = self.engine_core.core.state
        if kind is Preempted and fields["reason"] == "memory":
            victim = state.requests[fields["request"]].sequences[fields["index"]]
            residents = state.replicas[fields["replica"]].running
            assert residents, "the only resident was preempted for want of memory"
            assert residents[0].urgency < victim.urgency, "the most urgent resident was preempted for want of memory"
        return self._decide(kind, **fields)

    def _check_end(self) -> None:
        state = self.engine_core.core.state
        assert not state.requests, f"{len(state.requests)} requests never ended: {list(state.requests)[:5]}"
        assert len(self.engine_core.live) == 0
        for replica in state.replicas:
            assert replica.pool.num_available == replica.pool.num_blocks, "blocks leaked"
        for client in self.clients:
            if client.rejected is not None:
                assert not client.outcomes
                continue
            assert client.seq >= 0, "a request that nobody answered"
            assert len(client.outcomes) == client.request.n, "a sequence without an end"
            for index, outcome in client.outcomes.items():
                fitting = is_expected(outcome, client.request, client.seed, index, client.machine.fake)
                assert fitting, f"sequence {client.seq}.{index} ended with {outcome}"


def _names(machine: Machine) -> BlockNames:
    core = machine.core
    return BlockNames(b"names", block_size=core.block_size, capacity=PAIRS_PER_BLOCK * core.num_blocks)


def _raise(handler: object, event: Event, error: Exception) -> None:
    raise error


def _raise_of(requests: list[int], error: Exception) -> None:
    raise error
