"""A core with its facts stamped by hand: small scenarios, one drain at a time, validated after every event."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.events import (
    Arrived,
    Decision,
    Event,
    Fact,
    Finished,
    Header,
    Launched,
    Preempted,
    Recovered,
    Routed,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.fixed import Fixed
from eventlm.policies.pull import Pull
from tests.made_requests import make_arrival

E = TypeVar("E", bound=Event)

MILLISECOND = 1_000_000
LIMITS = {
    "block_size": 4,
    "num_blocks": 32,
    "max_model_len": 124,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "max_queue_len": 100,
    "max_steps_in_flight": 1,
    "max_decodes_in_flight_per_seq": 1,
}


class Rig:
    """One core. `last` holds the decisions of the latest drain, `decisions` all so far.

    sets: the limits of further replicasets, which have the same plug-ins.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        others: dict[str, Policy] | None = None,
        batcher: Batcher | None = None,
        router: Router | None = None,
        up: bool = True,
        sets: Seq[dict[str, Any]] = (),
        **limits: Any,
    ) -> None:
        config = CoreConfig(models=["m"], **(LIMITS | limits))  # type: ignore[arg-type]
        plugins = Plugins(
            policies={"first": policy or Fcfs()} | (others or {}),
            policy="first",
            batcher=batcher or Fixed(),
            router=router or Pull(),
        )
        predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
        configs = [config, *(CoreConfig(models=["n"], **(LIMITS | changed)) for changed in sets)]  # type: ignore[arg-type]
        self.core = Core(config, plugins, predictor, [SetParts(each, plugins, predictor) for each in configs[1:]])
        self.state = self.core.state
        self.now_ns = 0
        self.last: list[Decision] = []
        self.decisions: list[Decision] = []
        self.flying: dict[int, deque[Launched]] = {index: deque() for index in range(len(self.state.replicas))}
        self.core.apply(
            Header(run="r", unix_start_ns="0", code_version="0", core=config, plugins=[], predictor=[0] * 5)
        )
        if up:
            self.feed(*(WorkerUp(replica=index, epoch=1) for index in range(len(self.state.replicas))))

    def feed(self, *facts: Fact, at: int = 0) -> list[Decision]:
        """One drain; a millisecond after the one before unless said otherwise."""
        self.now_ns = at or self.now_ns + MILLISECOND
        self.last = []
        for index, fact in enumerate(facts, start=1):
            marked = int(index == len(facts))
            self.last += self.core.apply(structs.replace(fact, s=self.core.next_seq, ts=self.now_ns, p=marked))
            validate(self.state)
        validate_liveness(self.state)
        for launched in self.of(Launched):
            self.flying[launched.replica].append(launched)
        self.decisions += self.last
        return self.last

    def of(self, kind: type[E]) -> list[E]:
        """The latest drain's decisions of a kind."""
        return [decision for decision in self.last if isinstance(decision, kind)]

    def arrive(self, prompt_tokens: int = 4, max_tokens: int = 4, at: int = 0, **fields: Any) -> int:
        """A request alone in its drain; returns its seq."""
        return self.arrive_all(arrival(prompt_tokens, max_tokens, **fields), at=at)[0]

    def arrive_all(self, *arrivals: Arrived, at: int = 0) -> list[int]:
        """Requests of one drain, each a group of its own unless it says otherwise; returns their seqs."""
        before = self.core.next_seq
        self.feed(*arrivals, at=at)
        return [seq for seq in self.state.requests if seq >= before]

    def complete(
        self, replica: int = 0, *, produced: Seq[int] | None = None, ends: Any = (), filled: Any = (), at: int = 0
    ) -> list[Decision]:
        """The oldest step in flight is done; every row that may produce a token produces one."""
        return self.feed(self.completion(replica, produced=produced, ends=ends, filled=filled), at=at)

    def completion(
        self, replica: int = 0, *, produced: Seq[int] | None = None, ends: Any = (), filled: Any = ()
    ) -> StepCompleted:
        """The fact that the oldest step in flight is done."""
        launched = self.flying[replica].popleft()
        if produced is None:
            produced = [1] * len(launched.decodes) + [chunk[4] for chunk in launched.chunks]
        return StepCompleted(
            c=launched.s,
            replica=replica,
            epoch=launched.epoch,
            step=launched.step,
            start_ns=0,
            end_ns=1,
            produced=list(produced),
            ends=list(ends),
            filled=list(filled),
        )

    def lose(self, replica: int = 0, epoch: int = 1) -> list[Decision]:
        """A worker is lost, and its steps with it."""
        self.flying[replica].clear()
        return self.feed(WorkerLost(replica=replica, epoch=epoch))

    def recover(self) -> list[Decision]:
        """Another engine goes on: all workers are lost."""
        for steps in self.flying.values():
            steps.clear()
        return self.feed(Recovered(reason="killed", down_ns=1))

    def start_workers(self) -> list[Decision]:
        """Each replica has another worker."""
        return self.feed(*(WorkerUp(replica=each.index, epoch=each.epoch + 1) for each in self.state.replicas))

    def finish_all(self, max_steps: int = 1000) -> None:
        """Complete steps until nothing is in flight. Raises AssertionError if that takes more than `max_steps`."""
        for _ in range(max_steps):
            flying = [replica for replica, steps in self.flying.items() if steps]
            if not flying:
                return
            for replica in flying:
                self.complete(replica)
        raise AssertionError(f"still not done after {max_steps} steps")

    def sequence(self, request: int, index: int = 0) -> Sequence:
        """A live sequence."""
        return self.state.requests[request].sequences[index]

    def finished(self) -> list[tuple[int, int, str, int]]:
        """(request, index, reason, position) of all finishes so far, in order."""
        ends = [decision for decision in self.decisions if isinstance(decision, Finished)]
        return [(end.request, end.index, end.reason, end.position) for end in ends]

    def routed(self) -> list[tuple[int, int, int]]:
        """(request, index, replica) of all routes so far, in order."""
        return [(found.request, found.index, found.replica) for found in self.decisions if isinstance(found, Routed)]

    def preempted(self) -> list[tuple[int, str]]:
        """(request, reason) of all preemptions so far, in order."""
        return [(found.request, found.reason) for found in self.decisions if isinstance(found, Preempted)]


def arrival(prompt_tokens: int = 4, max_tokens: int = 4, **fields: Any) -> Arrived:
    """An arrival without block names, unless it brings some: nothing can be hit."""
    return make_arrival(prompt_tokens=prompt_tokens, max_tokens=max_tokens, **fields)


def group(*arrivals: Arrived) -> list[Arrived]:
    """Arrivals as one group."""
    return [
        structs.replace(member, group_size=len(arrivals), group_index=index) for index, member in enumerate(arrivals)
    ]


def rows(launched: Launched) -> list[int]:
    """The requests of a launch, row by row."""
    return [row[0] for row in [*launched.decodes, *launched.chunks]]
