"""A server with front-end processes: bind, start them and the engine, drain, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import structs

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import RECOVERY_SECONDS, EngineUnavailableError
from eventlm.frontend.front_ends import FrontEndController
from eventlm.frontend.process import FrontEndProcesses, OwnFrontEnds
from eventlm.frontend.protocol import FrontEndModel, FrontEndSetup
from eventlm.server.context import FINAL_WRITES_SECONDS
from eventlm.server.http_server import url_of
from eventlm.system.listening_sockets import bind_sockets
from eventlm.system.system import System
from eventlm.tasks import completed, together
from eventlm.types import NANOSECONDS_PER_SECOND, ceil_div

#: Time for a front end to leave, beyond the time for its requests.
_LEAVE_SECONDS = 5.0


class ServerWithFrontEnds:
    """The front ends of an engine. `module` is what the process of each runs; `bind` is as `bind_sockets`."""

    def __init__(
        self,
        system: System,
        engine: InferenceEngine,
        *,
        module: str,
        bind: Callable[[str, int, int], Coroutine[Any, Any, list[list[socket.socket]]]] = bind_sockets,
    ) -> None:
        self._system = system
        self._engine = engine
        self._module = module
        self._bind = bind
        self._controller: FrontEndController | None = None

    def reload(self) -> None:
        """Reload API keys and certificates from disk."""
        if self._controller is not None:
            self._controller.reload()

    async def run(
        self,
        *,
        processes: FrontEndProcesses | None = None,
        stop: asyncio.Event,
        cut: asyncio.Event,
        load: Callable[[], Coroutine[Any, Any, None]],
        on_listening: Callable[[str], Any],
        on_ready: Callable[[str], Any],
        on_draining: Callable[[int], Any],
    ) -> None:
        """As `eventlm.server.http_server.run_server`. processes: where the front ends run; by default their parent is
        this process, which binds the configured address.

        Raises also EngineUnavailableError if a front end does not start, or when none is left.
        """
        config = self._engine.setup.config
        if processes is None:
            sockets = await self._bind(config.server.host, config.server.port, config.server.api_servers)
            processes = OwnFrontEnds(self._system, self._module, sockets)
        controller = self._controller = FrontEndController(self._system, self._engine, self._setup(), processes)
        url = url_of(config.server, *processes.address)
        drain_seconds = config.server.drain_seconds + FINAL_WRITES_SECONDS + _LEAVE_SECONDS
        settling: asyncio.Task[None] | None = None
        try:
            on_listening(url)
            if await completed(together(controller.start(), load()), stop):
                if self._engine.edges_return:
                    settling = asyncio.create_task(self._settle(controller))
                on_ready(url)
                if await completed(controller.all_dead.wait(), stop) and not stop.is_set():
                    raise EngineUnavailableError("no front end is left; see the log above for why they ended")
            on_draining(await controller.begin_drain())
            await controller.drain(cut, timeout_seconds=drain_seconds)
        except BaseException:
            processes.let_go()
            raise
        finally:
            if settling is not None:
                settling.cancel()
            await controller.stop()

    async def _settle(self, controller: FrontEndController) -> None:
        """Once the front ends have named the streams that they had of the engine before, all others have no edge."""
        await controller.came_back(RECOVERY_SECONDS)
        self._engine.edges_have_left()

    def _setup(self) -> FrontEndSetup:
        engine, setup = self._engine, self._engine.setup
        server = setup.config.server
        share = structs.replace(server, max_connections=ceil_div(server.max_connections, server.api_servers))
        return FrontEndSetup(
            index=0,
            config=structs.replace(setup.config, server=share),
            model=setup.model,
            tokenizer=setup.tokenizer,
            model_names=engine.model_names,
            max_model_len=engine.max_model_len,
            vocab_size=setup.vocab_size,
            origin_ns=engine.origin_ns,
            created=self._system.clock.unix_ns() // NANOSECONDS_PER_SECOND,
            server_id=engine.server_id,
            session_key=self._system.chance.token_bytes(16),
            goes_on=engine.edges_return,
            others=[
                FrontEndModel(
                    model=each.model,
                    tokenizer=each.tokenizer,
                    model_impl=each.config.model.model_impl,
                    model_names=each.core.models,
                    vocab_size=each.vocab_size,
                    num_slots=each.core.num_replicas * each.core.max_residents,
                )
                for each in engine.setups[1:]
            ],
        )
