"""The shell of one replica that is another server: sends requests there, turns its answers into facts, and probes it.

A backend that fails several times in a row gets nothing more (its circuit is open) until it answers a probe. What it
has goes on meanwhile: each answer ends or fails by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextvars import Context
from typing import NamedTuple, Protocol

import structlog

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import (
    AnswerDelta,
    AnswerEnd,
    Attempt,
    AttemptId,
    Backend,
    BackendError,
    BackendFacts,
    described,
)
from eventlm.events import BackendDown, BackendState, BackendUp, Fact
from eventlm.events.forwarding import DRAINED
from eventlm.types import parts_per_million

#: Failures of these kinds say that something is wrong with the backend, and not only with a request or its load.
_OF_BACKENDS = ("connect", "timeout", "broken", "server", "protocol")

#: Backends are looked at in so many turns, and not all at the same moment.
_PROBE_PHASES = 64

WhyNot = Callable[[BackendSpec, BackendFacts], str]

log = structlog.get_logger("eventlm.backend")


class BackendOwner(Protocol):
    """What a backend needs of the engine."""

    @property
    def server_id(self) -> str:
        """As BackendFacts has it, of this server."""
        ...

    def now_ns(self) -> int:
        """The run's clock."""
        ...

    def put_fact(self, fact: Fact) -> None:
        """Queue a fact."""
        ...

    def answer_went_on(self, name: AttemptId, delta: AnswerDelta) -> None:
        """Queue what an answer goes on with."""
        ...

    def answer_ended(self, name: AttemptId, ended: AnswerEnd) -> None:
        """Queue the end of an answer."""
        ...

    def attempt_failed(self, name: AttemptId, error: BackendError) -> None:
        """Queue that an attempt failed."""
        ...

    def backends_changed(self) -> None:
        """A backend takes requests, or does no more."""
        ...


class Probing(NamedTuple):
    """interval_seconds: between two looks at a backend. max_failures: in a row, until it gets no more requests."""

    interval_seconds: float
    max_failures: int


class BackendController:
    """One backend. index: its replica. epoch: of the backend that the replica stood for before. why_not: says why one
    that answers so does not belong here; empty: it does.
    """

    def __init__(
        self,
        index: int,
        backend: Backend,
        owner: BackendOwner,
        probing: Probing,
        *,
        why_not: WhyNot = lambda *_: "",
        model: str = "",
        epoch: int = 0,
    ) -> None:
        self.index = index
        self.backend = backend
        self.name = backend.spec.name
        #: Whether it takes requests.
        self.is_up = False
        #: An operator wants it to get no requests.
        self.is_drained = False
        self.epoch = epoch
        #: Why it is down, as its last probe or request said.
        self.problem = "not asked yet"
        self._owner = owner
        self._probing = probing
        self._why_not = why_not
        self._names = {"backend": self.name} | ({"model": model} if model else {})
        self._attempts: dict[AttemptId, asyncio.Task[None]] = {}
        #: In a row.
        self.num_failures = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_attempts(self) -> int:
        """Requests that it has."""
        return len(self._attempts)

    async def ask(self) -> BackendFacts | None:
        """What it says of itself; None if it cannot be used, then `problem` says why."""
        try:
            facts = await self.backend.ask()
        except BackendError as error:
            self.problem = str(error)
            return None
        if facts.server_id and facts.server_id == self._owner.server_id:
            self.problem = f"{self.name} is this server itself; leave it out"
            return None
        self.problem = self._why_not(self.backend.spec, facts)
        return None if self.problem else facts

    def run(self) -> None:
        """Take requests, if it has answered, and look after it from now on."""
        if not self.problem:
            self._put_up()
        else:
            log.warning("backend is down", **self._names, reason=self.problem)
        self._task = asyncio.create_task(self._look_after(), name=f"backend {self.name}")

    def forward(self, name: AttemptId, attempt: Attempt, on_first: Callable[[], None] = lambda: None) -> None:
        """Send a request there. on_first: called when the answer begins."""
        # Not in the context of the request that happens to wake the engine: its id would be in our log.
        self._attempts[name] = asyncio.create_task(self._forward(name, attempt, on_first), context=Context())

    def end(self, name: AttemptId) -> None:
        """End a request there; nothing if it is over. No fact follows."""
        task = self._attempts.pop(name, None)
        if task is not None:
            task.cancel()

    def drain(self, *, drains: bool, reason: str = DRAINED) -> None:
        """Let it get no more requests, or again."""
        self.is_drained = drains
        if not drains and not self.problem:
            self._put_up()
        elif drains or not self.is_up:
            # Also of one that is down: the log has to tell what is wanted from what is wrong.
            self._put_down(reason if drains else "it does not answer")

    async def answered(self) -> None:
        """Wait until it has no requests."""
        while self._attempts:
            await asyncio.wait([*self._attempts.values()])

    async def stop(self) -> None:
        """End all requests and the probes."""
        tasks = [*self._attempts.values(), *([self._task] if self._task is not None else [])]
        self._attempts.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    def _put_up(self) -> None:
        if self.is_up or self.is_drained:
            return
        self.is_up = True
        self.epoch += 1
        self.num_failures = 0
        spec, facts = self.backend.spec, self.backend.facts
        self._owner.put_fact(
            BackendUp(
                replica=self.index,
                epoch=self.epoch,
                name=self.name,
                kind=facts.kind,
                max_concurrency=spec.max_concurrency or facts.max_concurrency,
                weight_ppm=parts_per_million(spec.weight),
            )
        )
        self._owner.backends_changed()
        log.info("backend is up", **described(spec, facts) | self._names, epoch=self.epoch)

    def _put_down(self, reason: str) -> None:
        self.is_up = False
        self._owner.put_fact(BackendDown(replica=self.index, epoch=self.epoch, reason=reason))
        self._owner.backends_changed()
        log.warning("backend is down", **self._names, reason=reason)

    def _note_failure(self, error: BackendError) -> None:
        self.num_failures += 1
        if self.num_failures >= self._probing.max_failures and self.is_up:
            self.problem = str(error)
            self._put_down(f"{self.num_failures} failures in a row, the last: {error.kind}")

    async def _forward(self, name: AttemptId, attempt: Attempt, on_first: Callable[[], None]) -> None:
        """Pass one answer on. Whoever ends it cancels the task, which closes the answer."""
        owner, has_begun = self._owner, False
        try:
            async with contextlib.aclosing(self.backend.forward(attempt)) as parts:
                async for part in parts:
                    if isinstance(part, AnswerDelta):
                        if not has_begun:
                            has_begun = True
                            on_first()
                        owner.answer_went_on(name, part)
                        continue
                    self.num_failures = 0
                    owner.answer_ended(name, part)
                    return
            raise BackendError("the answer has no end", "broken")
        except BackendError as error:
            self._fail(name, error)
        except Exception as error:
            log.exception("an answer could not be read: this is a defect, please report it", **self._names)
            self._fail(name, BackendError(f"a defect, {type(error).__name__}", "protocol"))
        finally:
            self._attempts.pop(name, None)

    def _fail(self, name: AttemptId, error: BackendError) -> None:
        self._owner.attempt_failed(name, error)
        if error.kind in _OF_BACKENDS:
            self._note_failure(error)

    async def _look_after(self) -> None:
        """Ask one that is down whether it is back, and one that is up for its load."""
        interval = self._probing.interval_seconds
        await asyncio.sleep(interval * (self.index % _PROBE_PHASES) / _PROBE_PHASES)
        while True:
            await asyncio.sleep(interval)
            if self.is_drained:
                continue
            try:
                await self._look()
            except Exception:
                log.exception("a backend could not be probed: this is a defect, please report it", **self._names)

    async def _look(self) -> None:
        if not self.is_up:
            if await self.ask() is not None:
                self._put_up()
            return
        try:
            load = await self.backend.read_load()
        except BackendError as error:
            self._note_failure(error)
            return
        if load is not None and self.is_up:
            self._owner.put_fact(
                BackendState(
                    replica=self.index,
                    epoch=self.epoch,
                    running=load.running,
                    waiting=load.waiting,
                    kv_used_ppm=load.kv_used_ppm,
                )
            )
