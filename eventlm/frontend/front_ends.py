"""All front ends of an engine: processes that serve HTTP, tokenize and detokenize.

The engine's process, or its keeper, binds the address once for each front end, with SO_REUSEPORT, and each front end
inherits its own socket. The kernel then spreads connections evenly; from one shared queue, the first process awake
would take a whole burst. Bind errors stay in one place, port 0 means one port, and connections that were not accepted
yet survive a front end's death, because that process keeps the queue for the next one.

Admission, limits and the log stay in the engine; front ends call it (`eventlm.frontend.protocol`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from msgspec import structs

from eventlm.frontend.front_end import FrontEnd
from eventlm.frontend.process import FrontEndProcesses
from eventlm.frontend.protocol import FrontEndSetup, Signal, StateChanged
from eventlm.metrics.components import FrontEndMetrics
from eventlm.system.system import System
from eventlm.tasks import together

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine

#: How long front ends may take to report how many requests they still have.
COUNT_SECONDS = 1.0

log = structlog.get_logger("eventlm.front_end")


class FrontEndController:
    """A front end for each number of `processes`; `setup.index` is filled in."""

    def __init__(
        self,
        system: System,
        engine: InferenceEngine,
        setup: FrontEndSetup,
        processes: FrontEndProcesses,
    ) -> None:
        #: Set when the last front end has been given up.
        self.all_dead = asyncio.Event()
        self._engine = engine
        self._num_dead = 0
        self._front_ends = [
            FrontEnd(
                system,
                structs.replace(setup, index=index),
                engine,
                lambda: self.metrics,
                processes,
                on_dead=self._on_dead,
            )
            for index in processes.numbers
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids, by number; 0 where there is none at the moment."""
        return [front_end.pid for front_end in self._front_ends]

    @property
    def metrics(self) -> list[FrontEndMetrics]:
        """The metrics of each."""
        return [front_end.metrics for front_end in self._front_ends]

    async def start(self) -> None:
        """Start all. Raises EngineUnavailableError if one does not start; `stop` is called in any case."""
        self._engine.on_state.append(self._send_state)
        await together(*(front_end.start() for front_end in self._front_ends))

    async def came_back(self, timeout_seconds: float) -> None:
        """Wait until all have named the streams that they had of an engine before, at most so long."""
        waits = [asyncio.create_task(front_end.came_back()) for front_end in self._front_ends]
        try:
            await asyncio.wait(waits, timeout=timeout_seconds)
        finally:
            for each in waits:
                each.cancel()

    async def begin_drain(self) -> int:
        """Let all refuse new requests and exit after their last one. Returns how many requests are left."""
        for front_end in self._front_ends:
            front_end.is_draining = True
            front_end.send(Signal("drain"))
        counts = [front_end.link.draining for front_end in self._front_ends if front_end.link is not None]
        if counts:
            await asyncio.wait(counts, timeout=COUNT_SECONDS)
        return sum(count.result() for count in counts if count.done())

    async def drain(self, cut: asyncio.Event, *, timeout_seconds: float) -> None:
        """Wait until all have exited; `cut` ends their requests at once. Those that take too long are killed."""
        ends = [asyncio.create_task(front_end.ended()) for front_end in self._front_ends]
        cutting = asyncio.create_task(self._cut(cut))
        try:
            await asyncio.wait(ends, timeout=timeout_seconds)
            for front_end, end in zip(self._front_ends, ends, strict=True):
                if not end.done():
                    log.warning("front end does not exit and is killed", front_end=front_end.index, pid=front_end.pid)
        finally:
            for each in (cutting, *ends):
                each.cancel()
            await self.stop()

    async def stop(self) -> None:
        """End all front ends. Harmless when called twice."""
        if self._send_state in self._engine.on_state:
            self._engine.on_state.remove(self._send_state)
        await asyncio.gather(*(front_end.stop() for front_end in self._front_ends))

    async def _cut(self, cut: asyncio.Event) -> None:
        await cut.wait()
        for front_end in self._front_ends:
            front_end.send(Signal("cut"))

    def reload(self) -> None:
        """Let all reload files that may have changed."""
        for front_end in self._front_ends:
            front_end.send(Signal("reload"))

    def _send_state(self) -> None:
        engine = self._engine
        changed = StateChanged(
            state=engine.state,
            paused=engine.paused,
            max_model_len=engine.max_model_len,
            has_worker=engine.has_worker,
            num_waiting_for_room=engine.num_waiting_for_room,
            models=engine.models,
            origin_ns=engine.origin_ns,
        )
        for front_end in self._front_ends:
            try:
                front_end.send(changed)
            except Exception:
                log.exception(
                    "the engine's state could not be sent to a front end: this is a defect, please report it",
                    front_end=front_end.index,
                )

    def _on_dead(self) -> None:
        self._num_dead += 1
        if self._num_dead == len(self._front_ends):
            self.all_dead.set()
