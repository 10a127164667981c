"""One front end: watches its process, and has another one started after its death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import structs

from eventlm.config.structs import memory_bytes
from eventlm.engine.request import EngineUnavailableError
from eventlm.frontend.link import NO_BEAT, FrontEndLink
from eventlm.frontend.process import FrontEndProcess, FrontEndProcesses
from eventlm.frontend.protocol import FrontEndFailed, FrontEndSetup, Signal, ToFrontEnd
from eventlm.metrics.components import FrontEndMetrics, HttpRequests, added
from eventlm.system.system import System

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine

#: Time limit for a start, which loads a tokenizer on a machine that may be busy.
START_SECONDS = 120.0
#: Pause before a restart. Each early death doubles it, up to MAX_DOUBLINGS times; a process that has lived for
#: STEADY_SECONDS resets it.
RESTART_SECONDS, MAX_DOUBLINGS = 0.1, 6
STEADY_SECONDS = 10.0
#: Failed starts in a row before a front end is given up.
MAX_FAILED_STARTS = 5
#: How long a process may take to exit after it has closed its connection.
LEAVE_SECONDS = 5.0
#: How long to wait for the exit status of a process whose connection was closed.
EXIT_STATUS_SECONDS = 0.1

log = structlog.get_logger("eventlm.front_end")


class FrontEnd:
    """Number `index`, from 1. `start`, then `stop`."""

    def __init__(
        self,
        system: System,
        setup: FrontEndSetup,
        engine: InferenceEngine,
        metrics: Callable[[], list[FrontEndMetrics]],
        processes: FrontEndProcesses,
        *,
        on_dead: Callable[[], None],
    ) -> None:
        self.index = setup.index
        self.is_draining = False
        self.num_restarts = 0
        self._system = system
        self._setup = setup
        self._engine = engine
        self._all_metrics = metrics
        self._processes = processes
        self._on_dead = on_dead
        self._process: FrontEndProcess | None = None
        self._link: FrontEndLink | None = None
        self._task: asyncio.Task[None] | None = None
        #: Early deaths in a row.
        self._num_failures = 0
        #: HTTP requests of the processes before the present one, by route, method and status.
        self._http_requests: HttpRequests = []

    @property
    def pid(self) -> int:
        """Process id of the current process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def link(self) -> FrontEndLink | None:
        """The connection to the current process."""
        return self._link

    @property
    def metrics(self) -> FrontEndMetrics:
        """Its metrics, at most one heartbeat old."""
        link = self._link
        is_up = link is not None and not link.lost.done() and link.started.done()
        beat = link.beat if link is not None and is_up else NO_BEAT
        http_requests = self._http_requests
        if link is not None:
            http_requests = added(http_requests, link.beat.http_requests)
        return FrontEndMetrics(
            index=self.index,
            is_up=is_up,
            num_restarts=self.num_restarts,
            num_requests=beat.num_requests,
            cpu_ns=beat.cpu_ns,
            resident_bytes=beat.resident_bytes,
            http_requests=http_requests,
        )

    async def start(self) -> None:
        """Start the first process. Raises EngineUnavailableError if it does not start.

        One that has lived through the death of an engine may die as well, and gets more chances.
        """
        try:
            await self._spawn()
        except EngineUnavailableError:
            if not self._engine.edges_return or not await self._restart():
                raise
        self._task = asyncio.create_task(self._supervise(), name=f"front end {self.index}")

    def send(self, message: ToFrontEnd) -> None:
        """Send a message to the current process, if there is one."""
        if self._link is not None:
            self._link.send(message)

    async def came_back(self) -> None:
        """Wait until the current process has named the streams that it had of an engine before, or is lost."""
        if self._link is not None:
            either: set[asyncio.Future[Any]] = {self._link.came_back, self._link.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def ended(self) -> None:
        """Wait until the process has ended for good."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """End the process and its supervision. Harmless when called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._discard()
        self._processes.close(self.index)

    def _present_setup(self) -> FrontEndSetup:
        """The setup with the engine's current state."""
        engine = self._engine
        return structs.replace(
            self._setup,
            state=engine.state,
            paused=engine.paused,
            max_model_len=engine.max_model_len,
            has_worker=engine.has_worker,
            num_waiting_for_room=engine.num_waiting_for_room,
            models=engine.models,
            origin_ns=engine.origin_ns,
        )

    async def _spawn(self) -> None:
        process = self._process = await self._processes.start(self.index)
        replay_bytes = memory_bytes(self._setup.config.server.resume_memory)
        link = self._link = FrontEndLink(self.index, self._engine, self._all_metrics, max_replay_bytes=replay_bytes)
        try:
            await link.open(process.end)
            process.death.add_done_callback(lambda _: link.lose(process.ending))
            link.send(self._present_setup())
            either: set[asyncio.Future[Any]] = {link.started, link.lost}
            await asyncio.wait(either, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self._discard()
            raise
        message = link.started.result() if link.started.done() else None
        if message is None:
            ending = f"sent nothing for {START_SECONDS:.0f} s"
            if link.lost.done():
                await asyncio.wait({process.death}, timeout=LEAVE_SECONDS)
                ending = process.ending or link.lost.result()
            await self._discard()
            raise EngineUnavailableError(f"front end {self.index} {ending} while it started; see its output above")
        if isinstance(message, FrontEndFailed):
            await self._discard()
            raise EngineUnavailableError(f"front end {self.index} did not start: {message.message}")
        if self.is_draining:
            link.send(Signal("drain"))

    async def _discard(self) -> None:
        process, self._process = self._process, None
        link, self._link = self._link, None
        if link is not None:
            link.lose("ended")
            self._http_requests = added(self._http_requests, link.beat.http_requests)
        if process is not None:
            await process.kill()

    async def _supervise(self) -> None:
        """Watch each process in turn until the front end is given up or drains."""
        try:
            while await self._serve_once():
                pass
        except Exception:
            log.exception("a front end cannot go on: this is a defect, please report it", front_end=self.index)
            await self._give_up()
        self._processes.close(self.index)

    async def _give_up(self) -> None:
        """End the process and its requests."""
        await self._discard()
        self._on_dead()
        try:
            self._engine.lose_front_end(self.index)
        except Exception:
            log.exception("the requests of a front end could not be ended", front_end=self.index)

    async def _serve_once(self) -> bool:
        """Watch the current process to its end and start the next; False if there will be none."""
        began_ns = self._system.clock.monotonic_ns()
        reason = await self._watch()
        await self._lose(reason)
        if self.is_draining:
            return False
        is_steady = self._system.clock.monotonic_ns() - began_ns >= STEADY_SECONDS * 1e9
        self._num_failures = 0 if is_steady else self._num_failures + 1
        return await self._restart()

    async def _watch(self) -> str:
        """Wait until the current process is lost, and return why. Silence is counted in waits, not by a clock: time
        in which this process itself could not listen must not count.
        """
        link = self._link
        assert link is not None
        worker = self._setup.config.worker
        beat_seconds, silence_seconds = worker.heartbeat_ns / 1e9, worker.heartbeat_timeout_seconds
        num_beats, num_silent = link.num_beats, 0
        while not link.lost.done():
            await asyncio.wait({link.lost}, timeout=beat_seconds)
            num_silent = 0 if link.num_beats != num_beats else num_silent + 1
            num_beats = link.num_beats
            if num_silent * beat_seconds >= silence_seconds:
                link.lose(f"no heartbeat for {silence_seconds} s")
        return link.lost.result()

    async def _lose(self, reason: str) -> None:
        """The process is gone or unusable: end its requests and clean up."""
        process = self._process
        assert process is not None
        if self.is_draining:
            await asyncio.wait({process.death}, timeout=LEAVE_SECONDS)
            if process.left_in_order:
                await self._discard()
                return
        self._engine.lose_front_end(self.index)
        await asyncio.wait({process.death}, timeout=EXIT_STATUS_SECONDS)
        reason = process.ending or reason
        await self._discard()
        log.warning("front end lost", front_end=self.index, pid=process.pid, reason=reason)

    async def _restart(self) -> bool:
        """Start the next process, with retries; False if all fail or a drain began."""
        for _ in range(MAX_FAILED_STARTS):
            await asyncio.sleep(RESTART_SECONDS * 2 ** min(self._num_failures, MAX_DOUBLINGS))
            if self.is_draining:
                return False
            self.num_restarts += 1
            try:
                await self._spawn()
            except EngineUnavailableError as error:
                self._num_failures += 1
                log.error("front end did not start", front_end=self.index, error=str(error))
                continue
            log.info("front end is back", front_end=self.index, pid=self.pid)
            return True
        log.error("front end given up", front_end=self.index)
        self._on_dead()
        return False
