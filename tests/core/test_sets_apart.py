"""Several replicasets in one core decide what each of them would decide in a core of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.events import (
    Arrived,
    CacheFlushed,
    Decision,
    Emitted,
    Event,
    Fact,
    FrontEndLost,
    Header,
    Launched,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Preempted,
    Resumed,
    Routed,
)
from eventlm.events.codec import decode_body
from tests.simulation import MemoryLog, Simulation
from tests.workload import COEFFICIENTS, Chaos, make_core

#: Without timers, which are one heap for the whole engine.
CHAOS = Chaos(drops_if_late=0)
#: Fields that name a request, alone or first in each row.
_OF_REQUESTS = ("request", "by", "decodes", "chunks", "forget")


class Unpaused(Simulation):
    """A workload without what would be about all sets: a pause, or the loss of a front end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        put_fact = self.engine_core.put_fact
        self.engine_core.put_fact = (  # type: ignore[method-assign]
            lambda fact: None if isinstance(fact, Paused | Resumed | FrontEndLost) else put_fact(fact)
        )


class Alone:
    """A workload on a core of its own: its facts, and the decisions that they led to."""

    def __init__(self, seed: int) -> None:
        log = MemoryLog()
        simulation = Unpaused(seed, chaos=CHAOS, check_every=0, num_requests=14, writer=log)
        simulation.run()
        self.machine = simulation.machine
        events = [decode_body(body) for body in log.bodies]
        self.facts = [event for event in events if isinstance(event, Fact)]
        self.decisions = [event for event in events if isinstance(event, Decision)]


class Together:
    """Facts of several workloads in one core."""

    def __init__(self, runs: list[Alone]) -> None:
        parts = []
        for run in runs:
            own = make_core(run.machine)[1].state.replicasets[0]
            parts.append(SetParts(own.config, own.plugins, Predictor.from_coefficients(COEFFICIENTS)))
        self.core = Core(*parts[0], parts[1:])
        self.core.apply(
            Header(run="r", unix_start_ns="0", code_version="0", core=parts[0].config, plugins=[], predictor=[0] * 5)
        )
        #: Of each set, from the numbers in its own log to those here, and back.
        self.here: list[dict[int, int]] = [{0: 0} for _ in runs]
        self.there: list[dict[int, int]] = [{0: 0} for _ in runs]
        self.decisions: list[list[dict[str, Any]]] = [[] for _ in runs]
        #: Launches that were decided here, by (replica, epoch, step).
        self.launches: dict[tuple[int, int, int], int] = {}

    def drain(self, facts: list[tuple[int, Fact]]) -> None:
        """Facts of one time, each of a set."""
        for position, (number, fact) in enumerate(facts, start=1):
            made = self._here(number, fact, is_last=position == len(facts))
            self.here[number][fact.s] = made.s
            self.there[number][made.s] = fact.s
            for decision in self.core.apply(made):
                self._take(decision)
            validate(self.core.state)
        validate_liveness(self.core.state)

    def _here(self, number: int, fact: Fact, *, is_last: bool) -> Fact:
        changes: dict[str, Any] = {"s": self.core.next_seq, "c": 0, "p": int(is_last)}
        if isinstance(fact, Arrived | CacheFlushed | PolicySwapped | PredictorSwapped):
            changes["replicaset"] = number
        if hasattr(fact, "request"):
            # One that never arrived anywhere stays unknown.
            changes["request"] = self.here[number].get(fact.request, 1 << 40)
        if hasattr(fact, "replica"):
            changes["replica"] = fact.replica + self.core.state.replicasets[number].first
            if hasattr(fact, "produced"):
                key = (changes["replica"], fact.epoch, fact.step)  # type: ignore[attr-defined]
                changes["c"] = self.launches.get(key, 0)
        return structs.replace(fact, **changes)

    def _take(self, decision: Decision) -> None:
        number = self._number_of(decision)
        if isinstance(decision, Launched):
            self.launches[decision.replica, decision.epoch, decision.step] = decision.s
        self.decisions[number].append(plain(decision, self.there[number], self.core.state.replicasets[number].first))

    def _number_of(self, decision: Decision) -> int:
        if isinstance(decision, Launched | Emitted | Preempted | Routed):
            return self.core.state.replicas[decision.replica].replicaset
        request: int = decision.request  # type: ignore[attr-defined]
        return next(number for number, there in enumerate(self.there) if there.get(request))


def plain(event: Event, requests: dict[int, int] | None = None, first: int = 0) -> dict[str, Any]:
    """A decision without its place in the log, with requests and replicas as in a log of its set."""
    built: dict[str, Any] = msgspec.to_builtins(event)
    for name in ("s", "c"):
        built.pop(name, None)
    if requests is not None:
        built = {name: _back(name, value, requests, first) for name, value in built.items()}
    return built


def _back(name: str, value: Any, requests: dict[int, int], first: int) -> Any:
    if name == "replica":
        return value - first
    if name not in _OF_REQUESTS or value is None:
        return value
    if name == "request":
        return requests[value]
    if name == "by":
        return (requests[value[0]], value[1])
    return [(requests[row[0]], *row[1:]) for row in value]


def drains_of(runs: list[Alone]) -> Iterator[list[tuple[int, Fact]]]:
    """The facts of all runs in the order of their times."""
    facts = [(number, fact) for number, run in enumerate(runs) for fact in run.facts]
    facts.sort(key=lambda each: each[1].ts)
    for _, same in groupby(facts, key=lambda each: each[1].ts):
        yield list(same)


@pytest.mark.parametrize("first_seed", range(0, 48, 4))
def test_each_set_decides_what_it_would_alone(first_seed: int) -> None:
    runs = [Alone(first_seed + i) for i in range(random.Random(first_seed).choice([2, 3]))]
    together = Together(runs)
    for drain in drains_of(runs):
        together.drain(drain)
    for number, run in enumerate(runs):
        assert together.decisions[number] == [plain(decision) for decision in run.decisions], f"set {number}"
    assert sum(len(run.decisions) for run in runs) > 100
