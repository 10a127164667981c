"""The engine's process: the real engine, recorder, supervision and HTTP server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eventlm.bootstrap.text_parts import TextParts, load_text
from eventlm.cli.serve.front_end import make_context
from eventlm.config import Config
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.setup import make_setup
from eventlm.server.http_server import run_server
from eventlm.worker.protocol import FAKE_MODEL
from tests.world import workers
from tests.world.host import WorldPipes, WorldSharedFolders, system_of
from tests.world.network import Listening
from tests.world.process import Process
from tests.world.world import World

ADDRESS = ("127.0.0.1", 8000)
RUNS = Path("/runs")


class WorldServer:
    """`eventlm serve` without front ends."""

    def __init__(self, world: World, config: Config, *, num_blocks: int, max_model_len: int) -> None:
        self.process = process = Process(world, "engine")
        pipes = WorldPipes(process)
        folders = WorldSharedFolders(process)
        programs = {workers.MODULE: workers.program(pipes, folders)}
        self.system = system_of(process, programs)._replace(pipes=pipes, shared_folders=folders)
        setup = make_setup(config, model=FAKE_MODEL, model_name="m", num_blocks=num_blocks, max_model_len=max_model_len)
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()
        self.is_ready = False
        self.engine: InferenceEngine | None = None
        self.listening: Listening | None = None
        process.run(self._serve(setup))

    async def _serve(self, setup: Any) -> int:
        engine = self.engine = InferenceEngine(setup, self.system)
        config = setup.config
        text = load_text(setup.model, config.model.model_impl, setup.tokenizer)
        context = make_context(
            self.system, engine, config, TextParts(*text[:3], setup.forwards), vocab_size=setup.vocab_size
        )
        listening = self.listening = self.process.world.network.listen(self.process, ADDRESS)
        try:
            await run_server(
                context,
                sockets=[listening],  # type: ignore[list-item]
                stop=self.stop,
                cut=self.cut,
                load=engine.start,
                on_ready=self._ready,
            )
        finally:
            await engine.stop()
        return 0

    def _ready(self, url: str) -> None:
        self.is_ready = True

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.loop.call_soon(self.stop.set)
