"""The keeper: an engine that dies is followed by another one, on the same sockets or with the same front ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from eventlm.config import Config
from eventlm.errors import EventLMError, ExitCode
from eventlm.keeper.engine_process import EngineProcess, KeeperError
from eventlm.keeper.front_ends import KeptFrontEnds
from eventlm.keeper.protocol import (
    VERSION,
    ConfigSource,
    HandOver,
    KeeperSignal,
    Prepare,
    RestartAnswer,
    TakeOver,
    encode,
    kept_options,
)
from eventlm.system.left_process import LeftProcess, remove_pipe
from eventlm.system.listening_sockets import bind_sockets
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.system import System
from eventlm.types import NANOSECONDS_PER_SECOND, RESTART

#: After so many deaths in so long a time the keeper gives up.
MAX_DEATHS, DEATHS_SECONDS = 5, 600
#: How long an engine serves before the next one is made ready, so that it does not compete with the start.
STANDBY_SECONDS = 10.0
#: How long an engine that does not serve yet may take to leave.
START_LEAVE_SECONDS = 2.0
#: How long an engine may take to hand over.
HAND_OVER_SECONDS = 30.0
#: How long what a dead engine has started may take to end.
ORPHANS_SECONDS = 30.0


log = structlog.get_logger("eventlm.keeper")


class Keeper:
    """Keeps an engine running, in a process that has no other children. source: where `restart` reads the configuration
    again. module, front_end_module: what the processes of engines and front ends run. bind: as `bind_sockets`.
    """

    def __init__(
        self,
        system: System,
        config: Config,
        source: ConfigSource,
        *,
        module: str,
        front_end_module: str,
        bind: Callable[[str, int, int], Coroutine[Any, Any, list[list[socket.socket]]]] = bind_sockets,
        standby_seconds: float = STANDBY_SECONDS,
    ) -> None:
        self._system = system
        self._server = config.server
        self._worker = config.worker
        self._kept_options = kept_options(config)
        self._source = source
        self._module = module
        self._front_end_module = front_end_module
        self._bind = bind
        self._standby_seconds = standby_seconds
        #: What the present engine serves, and what the one before did, until the present one serves too.
        self._config = encode(config)
        self._config_before: bytes | None = None
        #: What engines accept connections from, unless front ends do.
        self._sockets: list[socket.socket] = []
        self._front_ends: KeptFrontEnds | None = None
        self._address = ("", 0)
        #: All that have not ended.
        self._processes: dict[EngineProcess, None] = {}
        self._engine: EngineProcess | None = None
        #: Workers of the engine before, which the next one takes over or ends.
        self._workers: list[LeftProcess] = []
        #: When that one ended, on the monotonic clock.
        self._ended_ns = 0
        self._standby: EngineProcess | None = None
        #: What takes over when the present engine hands over, or dies.
        self._next: EngineProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_served = False
        self._stop = asyncio.Event()
        #: When engines died, on the monotonic clock.
        self._deaths: deque[int] = deque(maxlen=MAX_DEATHS)
        self._num_deaths = 0
        #: No process is spawned while orphans are ended, because it would look like one.
        self._spawning = asyncio.Lock()

    def reload(self) -> None:
        """Let the engine reload files that may have changed."""
        if self._engine is not None:
            self._engine.send(KeeperSignal("reload"))

    def restart(self) -> None:
        """Let an engine with the code and the configuration that are on the disk take over, if it can."""
        self._begin_restart(None, 0)

    async def run(self, stop: asyncio.Event, cut: asyncio.Event) -> int:
        """Keep an engine running until `stop` is set; it drains then, and `cut` makes that short. Returns the exit
        status.

        Raises UsageError for an address that cannot be bound, what the first start fails with, and KeeperError.
        """
        self._stop = stop
        num_front_ends = self._server.api_servers
        groups = await self._bind(self._server.host, self._server.port, num_front_ends or 1)
        self._address = groups[0][0].getsockname()[:2]
        if num_front_ends:
            self._front_ends = KeptFrontEnds(self._system, self._front_end_module, groups, self._spawning)
        else:
            [self._sockets] = groups
        try:
            self._do(self._stop_engine())
            self._do(self._cut_after(cut))
            return await self._keep()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for each in [*self._processes]:
                await each.kill()
            if self._front_ends is not None:
                await self._front_ends.close()
            left, self._workers = self._workers, []
            await self._end_orphans()
            for worker in left:
                remove_pipe(worker.addresses)
            for bound in self._sockets:
                bound.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self) -> int:
        engine = self._engine = await self._spawn(Prepare(version=VERSION, config=self._config))
        if self._stop.is_set():
            return ExitCode.OK
        follows = ""
        while True:
            await self._serve(engine, follows)
            if self._stop.is_set():
                return self._stopped(engine)
            if not self._has_served:
                return self._never_served(engine)
            successor = await self._successor(engine)
            if self._stop.is_set():
                return self._stopped(engine)
            follows, engine = engine.ending if engine.status else RESTART, successor
            self._engine = successor

    async def _serve(self, engine: EngineProcess, follows: str) -> None:
        """Let an engine serve until it is gone, and what it has started too. follows: as of TakeOver."""
        numbers = [] if self._front_ends is None else self._front_ends.numbers
        if self._front_ends is not None and not numbers:
            raise KeeperError("no front end is left; see the log above for why they ended")
        engine.send(TakeOver(follows, numbers, self._address, self._workers, self._ended_ns))
        started = self._do(self._after_start(engine))
        worker = self._worker
        await engine.watch(
            worker.heartbeat_ns / 1e9,
            worker.heartbeat_timeout_seconds,
            # A first start may have to fetch the model.
            worker.start_timeout_seconds if self._has_served else 0,
        )
        started.cancel()
        self._ended_ns = self._system.clock.monotonic_ns()
        self._has_served |= engine.is_serving
        if engine.workers is not None:
            self._workers = engine.workers
        await self._end_orphans()

    async def _end_orphans(self) -> None:
        """End what processes that are gone have started: a worker still has its memory and its GPU."""
        async with self._spawning:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ORPHANS_SECONDS):
                    spawned = {each.pid for each in self._processes} | {each.pid for each in self._workers}
                    if self._front_ends is not None:
                        spawned |= self._front_ends.pids
                    await self._system.processes.end_orphans(spawned)

    async def _after_start(self, engine: EngineProcess) -> None:
        """Once it serves, make the next one ready."""
        await asyncio.wait({engine.serving})
        self._config_before = None
        if self._num_deaths:
            log.info("engine is back", pid=engine.pid)
        await asyncio.sleep(self._standby_seconds)
        if self._standby is not None:
            return
        try:
            standby = self._standby = await self._spawn(Prepare(version=VERSION, config=self._config, ahead=True))
        except KeeperError as error:
            log.warning("no engine is made ready ahead", reason=str(error))
            return
        await standby.prepared_or_gone()
        if not standby.gone.done():
            log.debug("an engine is ready to take over", pid=standby.pid)
        elif self._standby is standby and not self._stop.is_set():
            log.warning("no engine is made ready ahead", reason=standby.ending)

    def _never_served(self, engine: EngineProcess) -> int:
        """The exit status after a first start that failed. Raises its error, unless the process has shown it itself."""
        if engine.failure is not None:
            raise EventLMError(engine.failure.message, exit_code=engine.failure.exit_code)
        if engine.status > 0:
            return engine.status
        raise KeeperError(f"the engine {engine.ending} while it started")

    def _stopped(self, engine: EngineProcess) -> int:
        """The exit status after a drain. Raises KeeperError if it was not completed."""
        if engine.status and engine.is_serving:
            raise KeeperError(f"the engine {engine.ending} while it was shutting down")
        return ExitCode.OK

    async def _successor(self, engine: EngineProcess) -> EngineProcess:
        """The process that follows an engine that is gone. Raises KeeperError if there have been too many deaths."""
        following, self._next = self._next, None
        standby, self._standby = self._standby, None
        if following is not None and not following.gone.done():
            self._config_before, self._config = self._config, following.config
            if standby is not None:
                await self._discard(standby)
            return following
        self._note_death(engine)
        if not engine.is_serving and self._config_before is not None:
            self._config, self._config_before = self._config_before, None
            log.warning("the engine goes back to the configuration before the restart")
        if standby is not None:
            if standby.prepared.done() and not standby.gone.done():
                return standby
            # It loads its libraries in its own time. From the beginning, without that, they are there earlier.
            await self._discard(standby)
        return await self._spawn(Prepare(version=VERSION, config=self._config))

    def _note_death(self, engine: EngineProcess) -> None:
        now_ns = self._system.clock.monotonic_ns()
        self._num_deaths += 1
        self._deaths.append(now_ns)
        log.warning("engine lost", pid=engine.pid, reason=engine.ending, deaths=self._num_deaths)
        if len(self._deaths) == MAX_DEATHS and now_ns - self._deaths[0] < DEATHS_SECONDS * NANOSECONDS_PER_SECOND:
            raise KeeperError(
                f"the engine was lost {MAX_DEATHS} times in {DEATHS_SECONDS // 60} minutes, the last time because it "
                f"{engine.ending}; see the log above"
            )

    async def _spawn(self, prepare: Prepare) -> EngineProcess:
        front_ends = self._front_ends
        async with self._spawning, contextlib.AsyncExitStack() as passing:
            sockets = self._sockets
            if front_ends is not None:
                try:
                    ours, theirs = map(passing.enter_context, self._system.pipes.pair())
                except OSError as error:
                    raise KeeperError(f"cannot start an engine: {error}") from error
                sockets = [theirs]
            process = await EngineProcess.spawn(
                self._system,
                self._module,
                sockets,
                prepare,
                self._begin_restart,
                front_ends.end if front_ends is not None else lambda _: None,
            )
            self._processes[process] = None
            if front_ends is not None:
                self._connect_front_ends(front_ends, process, ours)
                passing.pop_all()
                theirs.close()
        process.gone.add_done_callback(lambda _: self._processes.pop(process))
        return process

    def _connect_front_ends(self, front_ends: KeptFrontEnds, engine: EngineProcess, end: socket.socket) -> None:
        """Pass on the sockets by which an engine connects to front ends."""

        def connect(number: int, passed: socket.socket) -> None:
            self._do(front_ends.connect(number, passed, engine.send))

        passing = PassedSockets(end, connect)
        engine.gone.add_done_callback(lambda _: passing.close())

    async def _discard(self, process: EngineProcess) -> None:
        await process.kill()
        await self._end_orphans()

    def _begin_restart(self, asker: EngineProcess | None, number: int) -> None:
        error = ""
        if self._stop.is_set():
            error = "the server is shutting down"
        elif self._restarting is not None and not self._restarting.done():
            error = "another restart is under way"
        if error:
            self._refuse_restart(asker, number, error)
        else:
            self._restarting = self._do(self._restart(asker, number))

    def _refuse_restart(self, asker: EngineProcess | None, number: int, error: str) -> None:
        log.error("not restarted", error=error)
        if asker is not None:
            asker.send(RestartAnswer(number, error))

    async def _restart(self, asker: EngineProcess | None, number: int) -> None:
        """Make an engine ready, and let the present one hand over to it."""
        try:
            self._next = await self._prepare_next()
        except EventLMError as error:
            self._refuse_restart(asker, number, str(error))
            return
        if asker is not None:
            asker.send(RestartAnswer(number, ""))
        engine = self._engine
        assert engine is not None
        engine.send(HandOver())
        await asyncio.wait({engine.gone}, timeout=HAND_OVER_SECONDS)
        await engine.kill(f"did not hand over within {HAND_OVER_SECONDS:.0f} s")

    async def _prepare_next(self) -> EngineProcess:
        """A process that can take over with the configuration that is on the disk. Raises KeeperError, saying why it
        cannot.
        """
        if self._engine is None or not self._engine.is_serving:
            raise KeeperError("the engine is starting; try again")
        process = await self._spawn(Prepare(version=VERSION, source=self._source))
        try:
            await process.prepared_or_gone(self._worker.start_timeout_seconds)
            if process.gone.done():
                failure = process.failure
                raise KeeperError(failure.message if failure is not None else f"the next engine {process.ending}")
            if not process.prepared.done():
                raise KeeperError(f"the next engine was not ready within {self._worker.start_timeout_seconds} s")
            kept = process.prepared.result().kept
            if changed := [flag for flag, value in self._kept_options.items() if kept.get(flag, value) != value]:
                raise KeeperError(f"{', '.join(changed)} cannot be changed by a restart; stop the server and start it")
        except BaseException:
            await self._discard(process)
            raise
        return process

    async def _stop_engine(self) -> None:
        await self._stop.wait()
        if self._restarting is not None:
            self._restarting.cancel()
        engine = self._engine
        for each in [*self._processes]:
            if each is not engine:
                await each.kill()
        if engine is None:
            return
        engine.send(KeeperSignal("drain"))
        if not engine.is_serving:
            await asyncio.wait({engine.gone}, timeout=START_LEAVE_SECONDS)
            await engine.kill()

    async def _cut_after(self, cut: asyncio.Event) -> None:
        await cut.wait()
        if self._engine is not None:
            self._engine.send(KeeperSignal("cut"))
