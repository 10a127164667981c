"""An engine's process under a keeper: the server of `eventlm serve`, on sockets of the keeper, which starts it with

    python -m eventlm.cli.serve.engine CONTROL LISTENING,...

file descriptors all: its end of a socket pair with the keeper, and the sockets to accept connections from. It ends when
it is asked to, or when the other end of the pair is closed, so that there are never two engines.

With `--api-servers` the sockets to accept connections from are in the keeper's front ends, and LISTENING is an end of
another pair, over which this process connects to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
import uvloop

from eventlm.cli.logging_setup import configure_logging
from eventlm.cli.serve.server import ComposedServer, begun, check_server, compose_server, load_libraries
from eventlm.config import Config
from eventlm.config.load import load_config
from eventlm.errors import EventLMError, ExitCode, UsageError
from eventlm.frontend.kept_processes import KeptProcesses
from eventlm.keeper.protocol import (
    VERSION,
    EngineBeat,
    EnginePrepared,
    EngineWorkers,
    FromEngine,
    FrontEndEnded,
    FrontEndRuns,
    HandOver,
    KeeperSignal,
    Prepare,
    RestartAnswer,
    RestartRequest,
    Serving,
    StartFailed,
    TakeOver,
    decode_config,
    decode_to_engine,
    encode,
    kept_options,
)
from eventlm.system.frames import FrameConnection
from eventlm.system.left_process import LeftProcess
from eventlm.system.paired_process import inherited_sockets
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.system import System, real_system

#: How nice the thread is that loads libraries ahead of time. The process could not become less nice afterwards.
_NICE = 10
#: How long the answers to operators who have asked for a restart may take to be written.
_ANSWER_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1

_log = structlog.get_logger("eventlm.serve")


class KeptEngine:
    """The process: its end of the connection to the keeper, and its server."""

    def __init__(self, system: System, sockets: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        self._system = system
        self._sockets = sockets
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._prepare: asyncio.Future[Prepare] = loop.create_future()
        self._take_over: asyncio.Future[TakeOver] = loop.create_future()
        self._connection: FrameConnection | None = None
        self._server: ComposedServer | None = None
        self._front_ends: KeptProcesses | None = None
        self._is_serving = False
        #: As the keeper knows them.
        self._workers: list[LeftProcess] = []
        self._handing_over: asyncio.Task[None] | None = None
        #: Answers to restarts by number, and who waits for them.
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._askers: set[asyncio.Task[object]] = set()

    async def run(self, control: socket.socket) -> int:
        """Do what the keeper asks for; the process's exit status. control: its end of the pair."""
        self._connection = await FrameConnection.open(control, self._receive, self._lose)
        prepare = await self._prepare
        try:
            await self._serve(prepare, await self._find_config(prepare))
        except EventLMError as error:
            self._send(StartFailed(" ".join(str(error).splitlines()), error.exit_code))
            return error.exit_code
        finally:
            await self._connection.close()
        return ExitCode.OK

    async def _find_config(self, prepare: Prepare) -> Config:
        """The configuration to serve, checked if it is a new one. Raises what makes a start fail."""
        if prepare.version != VERSION:
            raise UsageError("the server runs under a keeper of another version; stop the server and start it")
        if prepare.source is None:
            return decode_config(prepare.config)
        config = load_config(prepare.source.path, prepare.source.options)
        await check_server(self._system, config)
        if config.record.recover:
            from eventlm.engine.recovery.recover import check_readable, spool_folder

            folder = spool_folder(self._system, config.record.recover)
            check_readable(self._system.disk, Path(config.record.folder), folder)
        return config

    async def _serve(self, prepare: Prepare, config: Config) -> None:
        """Get ready, and serve when the keeper says so."""
        configure_logging(config.log)
        beating = asyncio.create_task(self._beat(config.worker.heartbeat_ns / 1e9))
        try:
            async with begun(self._system, config) as beginning:
                if prepare.ahead:
                    with ThreadPoolExecutor(1, initializer=_be_nice) as threads:
                        await asyncio.get_running_loop().run_in_executor(threads, load_libraries)
                self._send(EnginePrepared(encode(config), kept_options(config)))
                take_over = await self._take_over
                server = self._server = await compose_server(self._system, beginning, binds=False)
                server.engine.on_state.append(self._note_state)
                server.engine.on_left = self._note_workers
                server.engine.on_restart = self._restart
                if take_over.follows:
                    server.engine.follows = take_over.follows
                    server.engine.left_workers = take_over.workers
                    server.engine.follows_ns = take_over.ended_ns
                    server.context.recovered.clear()
                if config.server.api_servers:
                    server.engine.edges_return = bool(take_over.follows)
                    [pair] = self._sockets
                    passed = PassedSockets(pair, lambda _, sent: sent.close())
                    numbers, address = take_over.front_ends, take_over.address
                    self._front_ends = KeptProcesses(self._system, passed, self._send, numbers, address)
                await server.run(
                    beginning,
                    stop=self._stop,
                    cut=self._cut,
                    sockets=self._sockets,
                    processes=self._front_ends,
                    on_ready=self._announce_serving,
                )
        finally:
            beating.cancel()

    def _announce_serving(self) -> None:
        assert self._server is not None
        self._is_serving = True
        self._server.context.recovered.set()
        self._send(Serving())

    def _note_state(self) -> None:
        """An engine that cannot go on makes room for the next one, which can."""
        assert self._server is not None
        if self._server.engine.state == "dead" and self._is_serving and not self._stop.is_set():
            asyncio.get_running_loop().call_soon(self._system.processes.exit, ExitCode.FAILED)

    def _note_workers(self) -> None:
        """Tell the keeper what the next engine could take over."""
        assert self._server is not None
        workers = self._server.engine.lasting_workers
        if workers != self._workers:
            self._workers = workers
            self._send(EngineWorkers(workers))

    async def _restart(self) -> None:
        """Ask the keeper for an engine that can take over. Raises RestartError if there is none."""
        from eventlm.engine.admin import RestartError

        asker = asyncio.current_task()
        assert asker is not None
        self._askers.add(asker)
        asker.add_done_callback(self._askers.discard)
        number = len(self._answers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(RestartRequest(number))
        if error := await answer:
            raise RestartError(error)

    async def _hand_over(self) -> None:
        """Close the log and end. Operators who have asked for it get their answers before."""
        if self._askers:
            await asyncio.wait(self._askers, timeout=_ANSWER_SECONDS)
        if self._server is not None and self._is_serving:
            self._server.engine.hand_over()
            _log.info("handed over")
        self._system.processes.exit(ExitCode.OK)

    async def _beat(self, interval_seconds: float) -> None:
        while True:
            self._send(EngineBeat())
            await asyncio.sleep(interval_seconds)

    def _send(self, message: FromEngine) -> None:
        assert self._connection is not None
        self._connection.send(encode(message))

    def _receive(self, body: bytes) -> None:
        match decode_to_engine(body):
            case Prepare() as message:
                self._prepare.set_result(message)
            case TakeOver() as message:
                self._take_over.set_result(message)
            case KeeperSignal(kind="reload"):
                if self._server is not None:
                    self._server.reload()
            case KeeperSignal(kind="drain"):
                self._stop.set()
            case KeeperSignal():
                self._cut.set()
            case FrontEndRuns() | FrontEndEnded() as message:
                assert self._front_ends is not None
                self._front_ends.take(message)
            case HandOver():
                self._handing_over = asyncio.create_task(self._hand_over())
            case RestartAnswer(id=number, error=error):
                if not self._answers[number].done():
                    self._answers[number].set_result(error)

    def _lose(self) -> None:
        """The keeper is gone, and the next one may start an engine at once."""
        self._system.processes.exit(ExitCode.FAILED, "eventlm: error: the keeper of this engine has died")


def _be_nice() -> None:
    """Let this thread have what processors have left; of the process only its others."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def main() -> int:
    """Entry point of the process."""
    # Service managers may signal all processes of a server; the keeper decides when the engine leaves.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # One that hangs does not see that its keeper has died.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    control, *listening = inherited_sockets(sys.argv[1], sys.argv[2])
    return uvloop.run(_run(control, listening))


async def _run(control: socket.socket, listening: Sequence[socket.socket]) -> int:
    return await KeptEngine(real_system(is_kept=True), listening).run(control)


if __name__ == "__main__":
    sys.exit(main())
