"""A front-end process of `eventlm serve --api-servers N`: HTTP, templates, tokens and text. The server starts it with

    python -m eventlm.cli.serve.front_end CONTROL LISTENING,... [kept]

file descriptors all: its end of a socket pair with the engine, and the sockets to accept connections from. It ends when
it is asked to, or when the other end of the pair is closed, so that no front end outlives its engine.

With `kept` the other end is the keeper's, who passes a socket for each engine that takes over. Such a front end
outlives its engines, but not its keeper.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import uvloop

from eventlm.bootstrap.text_parts import ServedText, TextParts, load_text
from eventlm.cli.logging_setup import configure_logging
from eventlm.config import Config
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import EventLMError
from eventlm.frontend.protocol import (
    Beat,
    Draining,
    FromFrontEnd,
    FrontEndFailed,
    FrontEndReady,
    FrontEndSetup,
    Signal,
    decode_to_front_end,
    encode,
)
from eventlm.frontend.remote_engine import RemoteEngine
from eventlm.server.auth.api_keys import ApiKeys
from eventlm.server.context import ServerContext, TextOfModel
from eventlm.server.http_server import run_server
from eventlm.system.frames import FrameConnection
from eventlm.system.paired_process import inherited_sockets
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.system import System, real_system
from eventlm.text.engine import Engine


class FrontEndServer:
    """The process: its end of the connection to the engine, and its server."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        #: None until the engine's first message has arrived.
        self.context: ServerContext | None = None
        self._connection: FrameConnection | None = None
        #: From the keeper, if there is one.
        self._passed: PassedSockets | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ready = False
        #: The engine's first message. The next one may arrive with it.
        self._begun: asyncio.Future[tuple[FrontEndSetup, RemoteEngine]] = asyncio.get_running_loop().create_future()

    async def serve(
        self,
        control: socket.socket,
        listening: Sequence[socket.socket],
        *,
        on_setup: Callable[[FrontEndSetup], Any],
        on_loaded: Callable[[], Any],
        is_kept: bool = False,
    ) -> int:
        """Serve until the engine asks for the end or is gone; the process's exit status.

        control: its end of the pair. listening: where it accepts connections. on_setup: gets the engine's first message
        before all else. on_loaded: called when everything is loaded, before the first connection. is_kept: the other
        end of the pair is a keeper's, and another engine follows one that is gone.
        """
        if is_kept:
            self._passed = PassedSockets(control, lambda _, end: self._follow(end), self._end)
        else:
            await self._connect(control)
        try:
            setup, engine = await self._begun
        except EngineUnavailableError:
            return 1
        on_setup(setup)
        try:
            context = self.context = self._make_context(setup, engine)
        except EventLMError as error:
            self.send(FrontEndFailed(str(error)))
            await self.close()
            return 1
        on_loaded()
        beating = asyncio.create_task(self._beat(context, setup.config.worker.heartbeat_ns / 1e9))
        try:
            await run_server(
                context,
                sockets=listening,
                on_ready=lambda _: self._announce_ready(),
                on_draining=lambda num_requests: self.send(Draining(num_requests)),
                stop=self.stop,
                cut=self.cut,
            )
        finally:
            beating.cancel()
            await self.close()
        return 0

    def send(self, message: FromFrontEnd) -> None:
        """Send a message to the engine, if there is one."""
        assert self._connection is not None
        self._connection.send(encode(message))

    async def close(self) -> None:
        """Close the connection once everything is sent."""
        for task in self._tasks:
            task.cancel()
        if self._passed is not None:
            self._passed.close()
        assert self._connection is not None
        await self._connection.close()

    def _announce_ready(self) -> None:
        self._is_ready = True
        self.send(FrontEndReady())

    async def _connect(self, end: socket.socket) -> None:
        self._connection = FrameConnection(self._receive, self._lose)
        await self._connection.connect(end)

    def _follow(self, end: socket.socket) -> None:
        """Another engine is at the other end of this."""
        if self._connection is not None:
            self._connection.abort()
            self._pause()
        self._do(self._connect(end))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _receive(self, body: bytes) -> None:
        message = decode_to_front_end(body)
        match message:
            case FrontEndSetup():
                if not self._begun.done():
                    self._begun.set_result((message, RemoteEngine(message, self.send, self._system.clock)))
                if self.context is not None:
                    self.context.session_key = message.session_key
                self._begun.result()[1].take(message)
                if self._is_ready:
                    self.send(FrontEndReady())
            case Signal(kind="reload"):
                if self.context is not None:
                    self.context.reload()
            case Signal(kind="drain"):
                self.stop.set()
            case Signal():
                self.cut.set()
            case _:
                self._begun.result()[1].take(message)

    def _lose(self) -> None:
        """The engine's process is gone."""
        if self._passed is not None:
            self._pause()
        else:
            self._end()

    def _pause(self) -> None:
        """Let streams wait for the next engine."""
        if not self._begun.done():
            return
        engine = self._begun.result()[1]
        was_there = engine.back.is_set()
        engine.pause()
        if self.context is not None and was_there:
            self._do(self.context.comment_until_recovered())

    def _end(self) -> None:
        """No engine will follow: streams end with an error, and so does this process."""
        if not self._begun.done():
            self._begun.set_exception(EngineUnavailableError("the engine's process has died"))
            return
        self._begun.result()[1].fail("the engine's process has died")
        self.stop.set()
        self.cut.set()

    def _make_context(self, setup: FrontEndSetup, engine: RemoteEngine) -> ServerContext:
        context = make_context(
            self._system,
            engine,
            setup.config,
            load_text(setup.model, setup.config.model.model_impl, setup.tokenizer),
            vocab_size=setup.vocab_size,
            engine_pid=self._system.processes.parent_pid,
            created=setup.created,
            session_key=setup.session_key,
            others=[
                ServedText(
                    each.model_names,
                    load_text(each.model, each.model_impl, each.tokenizer),
                    each.vocab_size,
                    each.num_slots,
                )
                for each in setup.others
            ],
        )
        context.recovered = engine.back
        return context

    async def _beat(self, context: ServerContext, interval_seconds: float) -> None:
        while True:
            usage = self._system.processes.usage()
            self.send(
                Beat(
                    num_requests=context.num_running,
                    cpu_ns=usage.cpu_ns,
                    resident_bytes=usage.resident_bytes,
                    http_requests=context.http_requests,
                )
            )
            await asyncio.sleep(interval_seconds)


def make_context(
    system: System,
    engine: Engine,
    config: Config,
    text: TextParts,
    *,
    vocab_size: int,
    keys: ApiKeys | None = None,
    engine_pid: int | None = None,
    created: int | None = None,
    others: Sequence[ServedText] = (),
    session_key: bytes = b"",
) -> ServerContext:
    """A server's context, in the engine's process or in a front end. others: of the further replicasets. session_key:
    as ServerContext has it.

    Raises UsageError if API keys cannot be read.
    """
    context = ServerContext(
        system,
        engine,
        text.tokenizer,
        config.server,
        defaults=text.defaults,
        vocab_size=vocab_size,
        facts=text.facts,
        num_slots=config.scheduler.max_num_seqs * config.parallel.decode_batches * config.scheduler.replicas,
        keys=keys,
        classes=config.classes,
        engine_pid=engine_pid,
        created=created,
        whole_config=config,
        session_key=session_key,
        forwards=text.forwards,
    )
    for each in others:
        vocab_size = each.vocab_size or each.text.tokenizer.vocab_size
        own = TextOfModel(*each.text[:3], vocab_size, each.num_slots, each.text.forwards)
        context.add_model(each.model_names, own)
    return context


def main() -> int:
    """Entry point of the process."""
    # Service managers may signal all processes of a server; the engine decides when front ends leave.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control, *listening = inherited_sockets(sys.argv[1], sys.argv[2])
    return uvloop.run(_serve(control, listening, is_kept=sys.argv[3:] == ["kept"]))


async def _serve(control: socket.socket, listening: Sequence[socket.socket], *, is_kept: bool) -> int:
    front_end = FrontEndServer(real_system())
    return await front_end.serve(control, listening, on_setup=_log_as_told, on_loaded=_freeze_objects, is_kept=is_kept)


def _log_as_told(setup: FrontEndSetup) -> None:
    configure_logging(setup.config.log, bound={"front_end": setup.index})


def _freeze_objects() -> None:
    """Loaded objects stay alive: without the freeze each full collection would stop all streams for 20 ms."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
