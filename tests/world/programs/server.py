"""The engine's process: the real engine, recorder, supervision and HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventlm.bootstrap.backends import ask_backends, backends_setup
from eventlm.bootstrap.front_ends import ServerWithFrontEnds
from eventlm.bootstrap.text_parts import TextParts, load_text
from eventlm.cli.serve.front_end import make_context
from eventlm.config import Config
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.setup import EngineSetup, make_setup
from eventlm.errors import EventLMError
from eventlm.server.http_server import run_server
from eventlm.system.system import System
from eventlm.worker.protocol import FAKE_MODEL
from tests.world.machine.host import system_of
from tests.world.machine.process import Process
from tests.world.machine.world import World
from tests.world.programs import front_ends, workers
from tests.world.programs.backends import connect_from
from tests.world.programs.front_ends import WorldFrontEnd

ADDRESS = ("127.0.0.1", 8000)
RUNS = Path("/runs")


class WorldServer:
    """A simulated `eventlm serve`."""

    def __init__(self, world: World, config: Config, *, name: str, num_blocks: int, max_model_len: int) -> None:
        self.process = process = Process(world, name)
        self.front_ends: list[WorldFrontEnd] = []
        #: When one of them last died.
        self.edge_lost_ns = -1
        modules = {
            workers.MODULE: workers.PROGRAMS,
            front_ends.MODULE: front_ends.module(self.front_ends, self._lose_edge),
        }
        self.system = system = system_of(process, modules)
        self._num_blocks, self._max_model_len = num_blocks, max_model_len
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        #: False at first: a gateway queries its backends before it listens.
        self.is_listening = False
        self.is_ready = False
        #: Called once it is.
        self.on_ready: Callable[[], None] = lambda: None
        self.engine: InferenceEngine | None = None
        #: Why it has ended, if nobody stopped it.
        self.error: EventLMError | None = None
        self._run_folder: Path | None = None
        process.run(self._serve(system, config))

    async def _find_setup(self, system: System, config: Config) -> EngineSetup:
        if config.gateway.backend:
            [asked] = (await ask_backends(config, connect_from(self.process), disk=system.disk)).values()
            return backends_setup(config, asked)
        return make_setup(
            config,
            model=FAKE_MODEL,
            model_name="m",
            num_blocks=self._num_blocks,
            max_model_len=self._max_model_len,
        )

    async def _serve(self, system: System, config: Config) -> int:
        try:
            return await self._serve_until_told(system, config)
        except EventLMError as error:
            self.error = error
            return error.exit_code

    async def _serve_until_told(self, system: System, config: Config) -> int:
        setup = await self._find_setup(system, config)
        engine = self.engine = InferenceEngine(setup, system)
        config = setup.config
        text = load_text(setup.model, config.model.model_impl, setup.tokenizer)
        context = make_context(
            system, engine, config, TextParts(*text[:3], setup.forwards), vocab_size=setup.vocab_size
        )

        async def load() -> None:
            await engine.start()
            context.adopt_orphans(engine)

        serving: dict[str, Any] = {
            "stop": self.stop,
            "cut": self.cut,
            "load": load,
            "on_listening": lambda _: None,
            "on_ready": self._ready,
            "on_draining": lambda _: None,
        }
        try:
            if config.server.api_servers:
                with_front_ends = ServerWithFrontEnds(system, engine, module=front_ends.MODULE, bind=self._bind)
                await with_front_ends.run(**serving)
            else:
                await run_server(context, sockets=(await self._bind(*ADDRESS, 1))[0], **serving)
        finally:
            await engine.stop()
        return 0

    async def _bind(self, host: str, port: int, num_processes: int) -> list[list[Any]]:
        network = self.process.world.network
        self.is_listening = True
        return [[network.listen(self.process, ADDRESS, shares=True)] for _ in range(num_processes)]

    @property
    def processes(self) -> list[Process]:
        """The engine's process and those of the living front ends."""
        return [self.process, *(each.process for each in self.front_ends)]

    def _lose_edge(self) -> None:
        self.edge_lost_ns = self.process.world.now_ns

    def _ready(self, url: str) -> None:
        self.process.world.after(0, self._see_ready)

    def _see_ready(self) -> None:
        if not self.process.is_dead:
            self.is_ready = True
            self.on_ready()

    @property
    def run_folder(self) -> Path | None:
        """The folder of its log, once there is one."""
        return self.engine.run_folder if self.engine is not None else self._run_folder

    def drop_engine(self) -> None:
        """Drop the engine: only the log of a dead server is still needed, and there may be many."""
        self._run_folder = self.run_folder
        self.engine = None

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.loop.call_soon(self.stop.set)
