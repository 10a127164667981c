"""Another server of `tests.simulation`, in virtual time: requests wait for one of its slots, and much goes wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, AttemptId, BackendError
from eventlm.engine.backends.answers import Answer
from eventlm.engine.engine_core import EngineCore
from eventlm.events import BackendDown, BackendState, BackendUp, Forwarded, Withdrawn
from eventlm.events.forwarding import FailureKind
from eventlm.types import SequenceId
from eventlm.worker.fake.tokens import draw, fake_token

MILLISECOND = 1_000_000
#: What a failed attempt may be.
FAILURES: tuple[FailureKind, ...] = ("connect", "timeout", "broken", "overloaded", "server", "refused", "protocol")


class BackendTraits(NamedTuple):
    """How the servers of a set behave. Chances are for each attempt.

    slots: requests that each runs at once; others wait there. tells_limit, tells_load: whether it says so, and what it
    runs. continues: whether it can go on from what another one gave.
    """

    slots: int = 2
    prefill_token_ns: int = 100_000
    decode_ns: int = 2 * MILLISECOND
    network_ns: int = MILLISECOND
    tells_limit: bool = True
    tells_load: bool = False
    continues: bool = False
    fails: float = 0.1
    stalls: float = 0.03


class World(Protocol):
    """What a server sees of the simulation that it is part of. Times are in nanoseconds."""

    rng: random.Random
    now_ns: int
    engine_core: EngineCore

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""


class _Attempt:
    """A request that it has. first: tokens that were shown before it; position: with those that it has given."""

    def __init__(self, forwarded: Forwarded, answer: Answer, prompt_tokens: int) -> None:
        self.name = AttemptId(forwarded.request, forwarded.index, forwarded.attempt)
        self.cached_tokens = forwarded.cached_tokens
        self.prompt_tokens = prompt_tokens
        self.seed = answer.seed
        self.first = self.position = answer.num_tokens


class VirtualBackend:
    """One replica that is another server."""

    def __init__(self, simulation: World, replica: int, traits: BackendTraits) -> None:
        self.simulation = simulation
        self.replica = replica
        self.traits = traits
        self.epoch = 0
        self.is_up = False
        self._waiting: deque[_Attempt] = deque()
        self._running: dict[AttemptId, _Attempt] = {}

    def start(self) -> None:
        """Come up."""
        self.epoch += 1
        self.is_up = True
        limit = self.traits.slots if self.traits.tells_limit else 0
        self.simulation.engine_core.put_fact(
            BackendUp(
                replica=self.replica,
                epoch=self.epoch,
                name=f"backend-{self.replica}:8000",
                kind="openai",
                max_concurrency=limit,
            )
        )
        if self.traits.tells_load:
            self._tell_load(self.epoch)

    def kill(self) -> None:
        """Lose what it has, and come back later."""
        if not self.is_up:
            return
        self.is_up = False
        for attempt in [*self._running.values(), *self._waiting]:
            self._fail(attempt, "broken")
        self.simulation.engine_core.put_fact(
            BackendDown(replica=self.replica, epoch=self.epoch, reason="3 failures in a row, the last: broken")
        )
        self.simulation.after(self.simulation.rng.randint(1, 60) * MILLISECOND, self.start)

    def orphan(self) -> None:
        """Its engine is gone."""
        self.is_up = False
        self._running.clear()
        self._waiting.clear()

    def forward(self, forwarded: Forwarded, answer: Answer, prompt_tokens: int) -> None:
        """Take a request."""
        rng, traits = self.simulation.rng, self.traits
        attempt = _Attempt(forwarded, answer, prompt_tokens)
        self._waiting.append(attempt)
        chance = rng.random()
        if chance < traits.fails or (attempt.first and not traits.continues) or not self.is_up:
            kind = rng.choice(FAILURES)
            self.simulation.after(rng.randint(1, 10) * MILLISECOND, lambda: self._fail(attempt, kind))
        elif chance < traits.fails + traits.stalls:
            self.simulation.after(80 * MILLISECOND, lambda: self._fail(attempt, "timeout"))
        else:
            self.simulation.after(traits.network_ns, self._run_next)

    def end(self, name: AttemptId) -> None:
        """Nobody wants the answer any more."""
        self._leave(name)
        self._run_next()

    def _leave(self, name: AttemptId) -> bool:
        known = len(self._running) + len(self._waiting)
        self._running.pop(name, None)
        self._waiting = deque(each for each in self._waiting if each.name != name)
        return len(self._running) + len(self._waiting) < known

    def _run_next(self) -> None:
        while self._waiting and len(self._running) < self.traits.slots and self.is_up:
            attempt = self._waiting.popleft()
            self._running[attempt.name] = attempt
            num_tokens = attempt.prompt_tokens - attempt.cached_tokens + attempt.first
            self.simulation.after(
                self.traits.network_ns + max(num_tokens, 1) * self.traits.prefill_token_ns,
                lambda attempt=attempt: self._go_on(attempt),  # type: ignore[misc]
            )

    def _go_on(self, attempt: _Attempt) -> None:
        """Give the next tokens, or the end."""
        if self._running.get(attempt.name) is not attempt:
            return
        rng, engine_core = self.simulation.rng, self.simulation.engine_core
        request = engine_core.core.state.requests[attempt.name.request].arrival
        is_embedding = request.scheduling.kind == "pool"
        total = 1 if is_embedding else answer_length(attempt.seed, request.max_tokens)
        if attempt.position > attempt.first and rng.random() < self.traits.fails / 10:
            self._fail(attempt, "broken")
            return
        if attempt.position < total:
            num_tokens = min(rng.choice([1, 1, 1, 3]), total - attempt.position)
            tokens = [] if is_embedding else answer_tokens(attempt.seed, total)[attempt.position :][:num_tokens]
            attempt.position += num_tokens
            delta = AnswerDelta(text="x" * num_tokens, num_tokens=len(tokens), token_ids=tokens)
            engine_core.answer_went_on(attempt.name, AnswerDelta(embedding=b"\0\0\0\0") if is_embedding else delta)
            self.simulation.after(num_tokens * self.traits.decode_ns, lambda: self._go_on(attempt))
            return
        self._leave(attempt.name)
        reason = "complete" if is_embedding else "length" if total == request.max_tokens else "stop"
        counts = AnswerUsage(attempt.prompt_tokens, total - attempt.first, attempt.cached_tokens)
        says = rng.random() < 0.5 and not is_embedding
        engine_core.answer_ended(attempt.name, AnswerEnd(reason, counts if says else AnswerUsage()))  # type: ignore[arg-type]
        self._run_next()

    def _fail(self, attempt: _Attempt, kind: FailureKind) -> None:
        if not self._leave(attempt.name):
            return
        status = {"overloaded": 429, "server": 500, "refused": 400}.get(kind, 0)
        retry_after_ns = 20 * MILLISECOND if kind == "overloaded" and self.simulation.rng.random() < 0.5 else 0
        self.simulation.engine_core.attempt_failed(
            attempt.name,
            BackendError("it failed", kind, status=status, retry_after_ns=retry_after_ns),
            can_continue=self.traits.continues,
        )
        self._run_next()

    def _tell_load(self, epoch: int) -> None:
        """What its metrics say, now and then while there is work."""
        engine_core = self.simulation.engine_core
        if epoch != self.epoch or not self.is_up:
            return
        engine_core.put_fact(
            BackendState(replica=self.replica, epoch=epoch, running=len(self._running), waiting=len(self._waiting))
        )
        if self._running or self._waiting or engine_core.core.state.requests or self.simulation.now_ns == 0:
            self.simulation.after(15 * MILLISECOND, lambda: self._tell_load(epoch))


class VirtualForwarder:
    """The servers of a simulation, by replica."""

    def __init__(self, backends: Mapping[int, VirtualBackend]) -> None:
        self.backends = backends
        self._under_way: dict[SequenceId, dict[int, int]] = {}

    def forward(self, forwarded: Forwarded, answer: Answer) -> None:
        """As Forwarder.forward."""
        backend = self.backends[forwarded.replica]
        identity = SequenceId(forwarded.request, forwarded.index)
        self._under_way.setdefault(identity, {})[forwarded.attempt] = forwarded.replica
        # The core has not left its drain, so the request is there.
        request = backend.simulation.engine_core.core.state.requests[forwarded.request]
        backend.forward(forwarded, answer, request.arrival.prompt_tokens)

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """As Forwarder.withdraw."""
        name = AttemptId(withdrawn.request, withdrawn.index, withdrawn.attempt)
        self.backends[withdrawn.replica].end(name)

    def finish(self, identity: SequenceId) -> None:
        """As Forwarder.finish."""
        for attempt, replica in self._under_way.pop(identity, {}).items():
            self.backends[replica].end(AttemptId(*identity, attempt))


def answer_length(seed: int, max_tokens: int) -> int:
    """How many tokens the answer of a sequence has, wherever it comes from."""
    return min(max_tokens, 1 + draw("length", seed) % 20)


def answer_tokens(seed: int, num_tokens: int) -> list[int]:
    """Its tokens."""
    return [fake_token(seed, 0, position) for position in range(num_tokens)]
