"""All backends of a replicaset: the replicas that they are, which come and go while the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Literal

import structlog
from msgspec import Struct

from eventlm.config.backends import BackendSpec
from eventlm.config.options import did_you_mean
from eventlm.config.structs import GatewayConfig
from eventlm.core.state.core_state import CoreState
from eventlm.engine.backend import Attempt, AttemptId, BackendError, BackendFacts, Connect, Watch
from eventlm.engine.backends.answers import Answer
from eventlm.engine.backends.controller import BackendController, BackendOwner, Probing
from eventlm.engine.backends.prompt_times import PromptTimes
from eventlm.engine.predictor.source import BACKEND_COEFFICIENTS
from eventlm.engine.setup import EngineSetup
from eventlm.errors import EventLMError, UsageError
from eventlm.events import PredictorSwapped
from eventlm.events.forwarding import REMOVED
from eventlm.tasks import gathered

#: Each has a deadline for its answers, and this process reads them all.
MAX_ASKED_AT_ONCE = 64

log = structlog.get_logger("eventlm.backend")


class UnknownBackendError(EventLMError):
    """There is no backend of this name."""


class BackendStatus(Struct, frozen=True, kw_only=True):
    """One backend as operators see it.

    name: host and port. model: of its replicaset. replica: which one it is to the scheduler. state: `leaving`: removed,
    and answers what it has. num_requests: that it has of this server. limit: how many it may have now. num_waiting:
    requests that wait there, from all clients; -1: it does not say. num_failures: in a row. problem: why it is down.
    """

    name: str
    model: str
    replica: int
    kind: str
    state: Literal["up", "down", "drained", "leaving"]
    num_requests: int
    limit: int
    num_waiting: int
    weight: float
    num_failures: int
    problem: str


class BackendSet:
    """The backends of one replicaset. Each takes a free replica; a removed one leaves it once it has no requests."""

    def __init__(self, setup: EngineSetup, owner: BackendOwner, *, number: int = 0, model: str = "") -> None:
        assert setup.connect is not None
        self._connect: Connect = setup.connect
        self._config: GatewayConfig = setup.config.gateway
        self._owner = owner
        self._number = number
        self._model = model
        #: None: an operator has said how long prompts take.
        self._prompt_times = None if setup.config.scheduler.predictor else PromptTimes(BACKEND_COEFFICIENTS[1])
        self._served_name = setup.core.models[0]
        self._models = setup.backend_models
        self._probing = Probing(self._config.probe_interval_ms / 1000, self._config.max_failures)
        self._free = [*range(setup.first_replica, setup.first_replica + setup.core.num_replicas)]
        #: Of replicas that no backend is, the epoch of the last one that was.
        self._epochs: dict[int, int] = {}
        self._controllers: dict[int, BackendController] = {}
        #: By replica.
        self._removing: dict[int, asyncio.Task[None]] = {}
        #: Names of a list for which there is no room yet.
        self._not_added: set[str] = set()
        self._watches = setup.watches
        self._watching: list[asyncio.Task[None]] = []
        for spec in setup.backends:
            self._place(spec)

    @property
    def is_up(self) -> bool:
        """Whether any of them takes requests."""
        return any(each.is_up for each in self._controllers.values())

    @property
    def specs(self) -> list[BackendSpec]:
        """How to reach each."""
        return [each.backend.spec for each in self._controllers.values()]

    @property
    def names(self) -> list[str]:
        """Of each, in the order of their replicas."""
        return [each.name for _, each in sorted(self._controllers.items())]

    def status(self, state: CoreState) -> list[BackendStatus]:
        """Of each, in the order of their replicas."""
        return [self._status(each, state) for _, each in sorted(self._controllers.items())]

    def _status(self, controller: BackendController, state: CoreState) -> BackendStatus:
        index, spec = controller.index, controller.backend.spec
        capacity = state.replicas[index].capacity
        assert capacity is not None
        is_leaving, is_known = index in self._removing, controller.is_up
        return BackendStatus(
            name=controller.name,
            model=self._served_name,
            replica=index,
            kind=controller.backend.facts.kind,
            state="leaving" if is_leaving else "drained" if controller.is_drained else "up" if is_known else "down",
            num_requests=controller.num_attempts,
            limit=capacity.limit if is_known else 0,
            num_waiting=capacity.waiting if is_known else -1,
            weight=spec.weight,
            num_failures=controller.num_failures,
            problem=controller.problem,
        )

    def go_on(self, epochs: Sequence[int]) -> None:
        """The backends are to go on with a run. epochs: of each replica's next backend."""
        self._epochs = {index: epochs[index] - 1 for index in self._free}
        for each in self._controllers.values():
            each.epoch = epochs[each.index] - 1

    async def start(self) -> None:
        """Ask all of them. Those that do not answer are down and asked again while the engine runs."""
        await gathered(BackendController.ask, self._controllers.values(), at_once=MAX_ASKED_AT_ONCE)

    def run(self) -> None:
        """The run has begun: send requests."""
        for each in self._controllers.values():
            each.run()
        self._watching = [asyncio.create_task(self._follow(each), name="watch of backends") for each in self._watches]

    async def stop(self) -> None:
        """End all requests and connections."""
        others = [*self._watching, *self._removing.values()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self._controllers.values()))

    def forward(self, replica: int, name: AttemptId, answer: Answer, num_cached: int) -> None:
        """Send a request to a backend, whose cache is taken to hold so many tokens of its prompt."""
        attempt = Attempt(
            request=answer.request,
            seed=answer.seed,
            request_id=f"eventlm-{name.request}.{name.index}.{name.attempt}",
            first_seconds=self._config.first_token_timeout_seconds,
            silence_seconds=self._config.silence_timeout_seconds,
            text="".join(answer.texts),
            token_ids=answer.token_ids or [],
            num_tokens=answer.num_tokens,
        )
        controller = self._controllers[replica]
        if answer.num_tokens and not _can_continue(controller, answer):
            told = "the backend that had begun this answer failed, and no other one can go on from there"
            self._owner.attempt_failed(name, BackendError(told, "refused"))
            return
        sent_ns, num_tokens = self._owner.now_ns(), answer.prompt_tokens - num_cached

        def note_first() -> None:
            if not attempt.num_tokens:
                self._note_first(self._owner.now_ns() - sent_ns, num_tokens)

        controller.forward(name, attempt, note_first)

    def _note_first(self, taken_ns: int, num_tokens: int) -> None:
        token_ps = None if self._prompt_times is None else self._prompt_times.note(taken_ns, num_tokens)
        if token_ps is not None:
            self._owner.put_fact(PredictorSwapped(coefficients=[0, token_ps, 0, 0, 0], replicaset=self._number))

    def end(self, replica: int, name: AttemptId) -> None:
        """End a request there; nothing if it is over."""
        if replica in self._controllers:
            self._controllers[replica].end(name)

    def can_continue(self, answer: Answer) -> bool:
        """Whether some backend that takes requests can go on from what was shown of an answer."""
        return any(each.is_up and _can_continue(each, answer) for each in self._controllers.values())

    async def add(self, spec: BackendSpec) -> None:
        """Take in a backend while the engine runs. Raises UsageError if it is there, or there is no room."""
        controller = self._place(spec)
        await controller.ask()
        # It may have been removed meanwhile.
        if self._controllers.get(controller.index) is controller and controller.index not in self._removing:
            controller.run()

    def drain(self, name: str, *, drains: bool) -> None:
        """Let a backend get no more requests, or again. Raises UnknownBackendError, or UsageError for one that is
        being removed.
        """
        controller = self._find(name)
        if controller.index in self._removing:
            raise UsageError(f"the backend {name} has been removed, and answers what it has")
        controller.drain(drains=drains)

    def remove(self, name: str) -> None:
        """Let a backend go once it has answered what it has. Raises UnknownBackendError."""
        controller = self._find(name)
        if controller.index not in self._removing:
            controller.drain(drains=True, reason=REMOVED)
            task = asyncio.create_task(self._leave(controller), name=f"removal of {name}")
            self._removing[controller.index] = task

    async def follow(self, specs: Iterable[BackendSpec], known: Iterable[BackendSpec]) -> list[BackendSpec]:
        """Take in those of a list that are new, and remove those that were `known` from it and are not there any more.
        Returns those that it has now; what it could not add is tried again with the next list.
        """
        wanted = {spec.name: spec for spec in specs}
        before = {spec.name: spec for spec in known}
        present = {spec.name for spec in self.specs}
        for name in before:
            if name not in wanted and name in present:
                self.remove(name)
        kept = []
        for name, spec in wanted.items():
            if name in before or name in present:
                if name in before or self._stays(spec):
                    kept.append(spec)
                continue
            try:
                await self.add(spec)
                kept.append(spec)
            except UsageError as error:
                level = "debug" if name in self._not_added else "warning"
                getattr(log, level)("a backend could not be added", backend=name, reason=str(error))
                self._not_added.add(name)
        self._not_added -= {spec.name for spec in kept} | (before.keys() - wanted.keys())
        return kept

    def _stays(self, spec: BackendSpec) -> bool:
        """Whether a backend that is here will go on to be. One that is leaving is taken back if it has requests still:
        addresses can be missing from an answer of DNS for a moment.
        """
        controller = self._find(spec.name)
        task = self._removing.get(controller.index)
        if task is None:
            return True
        if controller.backend.spec != spec or not controller.num_attempts:
            return False
        task.cancel()
        del self._removing[controller.index]
        controller.drain(drains=False)
        return True

    async def _follow(self, watch: Watch) -> None:
        known: list[BackendSpec] = []
        async for specs in watch():
            known = await self.follow(specs, known)

    def _place(self, spec: BackendSpec) -> BackendController:
        if any(each.name == spec.name for each in self._controllers.values()):
            raise UsageError(f"the backend {spec.name} is there already")
        if not self._free:
            raise UsageError(
                f"the backend {spec.name} has no room: there are {len(self._controllers)}; raise --max-backends"
            )
        index = self._free.pop(0)
        controller = self._controllers[index] = BackendController(
            index,
            self._connect(spec),
            self._owner,
            self._probing,
            why_not=self._why_not,
            model=self._model,
            epoch=self._epochs.get(index, 0),
        )
        return controller

    def _why_not(self, spec: BackendSpec, facts: BackendFacts) -> str:
        """Why a backend that answers so does not belong here; empty if it does."""
        if self._models and facts.models and not spec.model and not set(self._models) & set(facts.models):
            return f"it serves {', '.join(facts.models)}, and the others here {', '.join(self._models)}"
        return ""

    def _find(self, name: str) -> BackendController:
        for each in self._controllers.values():
            if each.name == name:
                return each
        raise UnknownBackendError(f"there is no backend {name!r}{did_you_mean(name, self.names)}")

    async def _leave(self, controller: BackendController) -> None:
        await controller.answered()
        await controller.stop()
        del self._controllers[controller.index], self._removing[controller.index]
        self._epochs[controller.index] = controller.epoch
        # The one that was free longest goes first, so that a plot can tell them apart.
        self._free.append(controller.index)


def _can_continue(controller: BackendController, answer: Answer) -> bool:
    return answer.is_plain and controller.backend.can_continue(answer.request, is_counted=answer.is_counted)
