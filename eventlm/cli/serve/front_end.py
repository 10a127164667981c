"""A front-end process of `eventlm serve --api-servers N`: HTTP, templates, tokens and text. The server starts it with

    python -m eventlm.cli.serve.front_end CONTROL LISTENING,...

file descriptors all: its end of a socket pair with the engine, and the sockets to accept connections from. It ends when
it is asked to, or when the other end of the pair is closed, so that no front end outlives its engine.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence

import uvloop

from eventlm.bootstrap.text_parts import ServedText, TextParts, load_text
from eventlm.cli.logging_setup import configure_logging
from eventlm.config import Config
from eventlm.errors import EventLMError
from eventlm.frontend.front_end import BEAT_SECONDS
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
from eventlm.system.clock import SystemClock
from eventlm.system.frames import FrameConnection
from eventlm.system.system import System, real_system
from eventlm.text.engine import Engine

_PAGE_BYTES = resource.getpagesize()


class FrontEndServer:
    """The process's end of the connection to the engine."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        #: None until the engine's first message has arrived.
        self.context: ServerContext | None = None
        self._connection: FrameConnection | None = None
        #: The engine's first message. The next one may arrive with it.
        self._begun: asyncio.Future[tuple[FrontEndSetup, RemoteEngine]] = asyncio.get_running_loop().create_future()

    async def open(self, end: socket.socket) -> tuple[FrontEndSetup, RemoteEngine]:
        """Connect, and wait for the engine's first message."""
        self._connection = await FrameConnection.open(end, self._receive, self._lose)
        return await self._begun

    def send(self, message: FromFrontEnd) -> None:
        """Send a message to the engine."""
        assert self._connection is not None
        self._connection.send(encode(message))

    async def close(self) -> None:
        """Close the connection once everything is sent."""
        assert self._connection is not None
        await self._connection.close()

    def _receive(self, body: bytes) -> None:
        message = decode_to_front_end(body)
        match message:
            case FrontEndSetup():
                self._begun.set_result((message, RemoteEngine(message, self.send, SystemClock())))
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
        """The engine's process is gone: streams end with an error, and so does this process."""
        if not self._begun.done():
            os._exit(1)
        self._begun.result()[1].fail("the engine's process has died")
        self.stop.set()
        self.cut.set()


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


async def _serve(control: int, listening: Sequence[int]) -> int:
    front_end = FrontEndServer()
    setup, engine = await front_end.open(socket.socket(fileno=control))
    configure_logging(setup.config.log, bound={"front_end": setup.index})
    try:
        context = front_end.context = make_context(
            real_system(),
            engine,
            setup.config,
            load_text(setup.model, setup.config.model.model_impl, setup.tokenizer),
            vocab_size=setup.vocab_size,
            engine_pid=os.getppid(),
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
    except EventLMError as error:
        front_end.send(FrontEndFailed(str(error)))
        await front_end.close()
        return 1
    # Loaded objects stay alive: without the freeze each full collection would stop all streams for 20 ms.
    gc.collect()
    gc.freeze()
    beating = asyncio.create_task(_beat(front_end, context))
    try:
        await run_server(
            context,
            sockets=[socket.socket(fileno=number) for number in listening],
            on_ready=lambda _: front_end.send(FrontEndReady()),
            on_draining=lambda num_requests: front_end.send(Draining(num_requests)),
            stop=front_end.stop,
            cut=front_end.cut,
        )
    finally:
        beating.cancel()
        await front_end.close()
    return 0


async def _beat(front_end: FrontEndServer, context: ServerContext) -> None:
    while True:
        front_end.send(
            Beat(
                num_requests=context.num_running,
                cpu_ns=time.process_time_ns(),
                resident_bytes=_resident_bytes(),
                http_requests=context.http_requests,
            )
        )
        await asyncio.sleep(BEAT_SECONDS)


def _resident_bytes() -> int:
    """This process's, which is a file in memory: reading it does not wait."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def main() -> int:
    """Entry point of the process."""
    # Service managers may signal all processes of a server; the engine decides when front ends leave.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return uvloop.run(_serve(int(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]))


if __name__ == "__main__":
    sys.exit(main())
