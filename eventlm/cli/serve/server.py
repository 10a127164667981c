"""The server of `eventlm serve`: what its process does, alone or under a keeper."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlm.cli.serve.announcements import all_models, announce_end, announce_ready
from eventlm.cli.serve.file_limit import raise_file_limit
from eventlm.config import Config, ServerConfig
from eventlm.config.core import MAX_NUMBER
from eventlm.config.structs import AUTO, memory_bytes
from eventlm.errors import TooLittleMemoryError
from eventlm.system.collector import lasting_objects

if TYPE_CHECKING:
    from eventlm.bootstrap.front_ends import ServerWithFrontEnds
    from eventlm.engine.inference_engine import InferenceEngine
    from eventlm.frontend.process import FrontEndProcesses
    from eventlm.launchers.launcher import StartedRank
    from eventlm.server.context import ServerContext
    from eventlm.system.system import System


#: With `--recover`: the longest segment, and for how long streams can be resumed unless more is asked for.
_RECOVERY_SEGMENT = "8MiB"
_RECOVERY_RESUME_SECONDS = 60


class Beginning(NamedTuple):
    """What a server is composed from: a configuration, warnings about it, and worker processes without a setup."""

    config: Config
    warnings: list[str]
    spawned: Sequence[StartedRank]


@contextlib.asynccontextmanager
async def begun(system: System, config: Config) -> AsyncIterator[Beginning]:
    """Raise the limit on open files and spawn workers. They load torch, which takes as long as everything else up to
    the engine's start, and a core each. Those that still run end with the context.

    Raises UsageError.
    """
    from msgspec import structs

    from eventlm.engine.plugins.launchers import resolve_launcher
    from eventlm.engine.setup import num_own_workers
    from eventlm.launchers.spawned_worker import spawned_ahead
    from eventlm.system.processors import usable_cores
    from eventlm.worker.protocol import FAKE_MODEL

    # A mistake in them is found before there are processes to end.
    configs = _check_plugins(config)
    with_workers = [own for own in configs if num_own_workers(own)]
    launchers = [resolve_launcher(own.parallel.launcher) for own in with_workers]
    # Workers inherit the limit.
    server, few_files = raise_file_limit(config.server, forwards=any(own.gateway.backend for own in configs))
    num_workers = 0
    if all(launcher.is_local for launcher in launchers) and with_workers and with_workers[0].model.model != FAKE_MODEL:
        num_workers = min(sum(map(num_own_workers, with_workers)), usable_cores())
    async with spawned_ahead(system, num_workers, "torch") as spawned:
        yield Beginning(structs.replace(config, server=server), few_files, spawned)


def _check_plugins(config: Config) -> list[Config]:
    """The configurations of all replicasets. Raises UsageError for plug-ins that there are not."""
    from eventlm.config.replicasets import configs_of_replicasets
    from eventlm.engine.setup import resolve_plugins

    configs = list(configs_of_replicasets(config).values())
    for own in configs:
        resolve_plugins(own.scheduler)
    return configs


class ComposedServer(NamedTuple):
    """A server that has not been started."""

    engine: InferenceEngine
    context: ServerContext
    front_ends: ServerWithFrontEnds | None

    def reload(self) -> None:
        """Reload files that may have changed."""
        (self.front_ends or self.context).reload()

    async def run(
        self,
        beginning: Beginning,
        *,
        stop: asyncio.Event,
        cut: asyncio.Event,
        sockets: Sequence[socket.socket] = (),
        processes: FrontEndProcesses | None = None,
        on_ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Start it, serve until `stop` is set, then drain; `cut` makes that short. sockets: already bound, if given.
        processes: where front ends run, if not under this process.

        Raises what a start raises.
        """
        import structlog

        from eventlm.server.http_server import run_server

        engine, config = self.engine, beginning.config
        log = structlog.get_logger("eventlm.serve")

        def begin(url: str) -> None:
            # Loaded objects stay alive: without the freeze each full collection would stop all streams for 20 ms.
            gc.collect()
            gc.freeze()
            on_ready()
            announce_ready(url, engine)

        async def load() -> None:
            await engine.start(spawned=beginning.spawned)
            if not engine.edges_return:
                self.context.adopt_orphans(engine)

        serving: dict[str, Any] = {
            "on_listening": lambda url: log.info(
                "loading", url=url, model=engine.setup.model or engine.model_names[0], **all_models(engine.model_names)
            ),
            "on_ready": begin,
            "on_draining": lambda num_requests: announce_end(num_requests, config),
            "load": load,
            "stop": stop,
            "cut": cut,
        }
        engine.on_orphans = partial(self.context.adopt_orphans, engine)
        try:
            if self.front_ends is not None:
                await self.front_ends.run(processes=processes, **serving)
            else:
                await run_server(self.context, sockets=sockets, **serving)
        finally:
            await engine.stop()
            if self.front_ends is not None:
                await self.context.close()
        log.info("stopped")


def load_libraries() -> None:
    """Import what a server needs, which takes seconds."""
    with lasting_objects():
        import eventlm.bootstrap.backends
        import eventlm.bootstrap.composition
        import eventlm.bootstrap.front_ends
        import eventlm.cli.serve.front_end
        import eventlm.gateway.client
        import eventlm.server.http_server  # noqa: F401


async def compose_server(
    system: System, beginning: Beginning, *, binds: bool = True, is_trial: bool = False
) -> ComposedServer:
    """Find all that can be wrong before a model is fetched, and compose the server. binds: False if it gets sockets.
    is_trial: beside a server that uses its files and its memory.

    Raises UsageError, CheckpointError or PullError.
    """
    load_libraries()
    import structlog

    from eventlm.bootstrap.backends import ask_backends
    from eventlm.bootstrap.composition import compose
    from eventlm.bootstrap.front_ends import ServerWithFrontEnds
    from eventlm.bootstrap.text_parts import TextParts
    from eventlm.cli.logging_setup import configure_logging
    from eventlm.cli.serve.front_end import make_context
    from eventlm.engine.object_store.database import check_file
    from eventlm.gateway.client import HttpBackend
    from eventlm.server.auth.api_keys import ApiKeys
    from eventlm.server.batches.folder import BatchFolder
    from eventlm.server.http_server import check_config
    from eventlm.server.scheduling import check_key_classes

    config = beginning.config
    configure_logging(config.log)
    await check_config(config.server, binds=binds)
    keys = ApiKeys(system, config.server)
    if not is_trial:
        check_file(config.server)
    if config.server.batch_dir:
        BatchFolder(system, config.server)
    config, no_record = _choose_record(with_resumable_streams(with_room_for_batches(config)))
    asked = await ask_backends(config, HttpBackend)
    engine, tokenizer, defaults, vocab_size, facts, warnings, others = compose(
        config, all_sets=True, backends=asked, system=system
    )
    text = TextParts(tokenizer, defaults, facts, engine.setup.forwards)
    context = make_context(system, engine, engine.setup.config, text, vocab_size=vocab_size, keys=keys, others=others)
    warnings = [*no_record, *beginning.warnings, *warnings, *_exposure(config.server), *check_key_classes(context)]
    for warning in [] if is_trial else warnings:
        structlog.get_logger("eventlm.serve").warning(warning)
    front_ends = None
    if config.server.api_servers:
        front_ends = ServerWithFrontEnds(system, engine, module="eventlm.cli.serve.front_end")
    return ComposedServer(engine, context, front_ends)


async def check_server(system: System, config: Config) -> None:
    """Raise what a start with this configuration would raise. A lack of memory does not count: a server is running."""
    _check_plugins(config)
    with contextlib.suppress(TooLittleMemoryError):
        await compose_server(system, Beginning(config, [], []), binds=False, is_trial=True)


def with_room_for_batches(config: Config) -> Config:
    """Batches get their window, and room in the queue for that or for the largest line, so that no other request is
    refused because of them.
    """
    from msgspec import structs

    scheduler = config.scheduler
    if not config.server.batch_dir:
        return config
    num_slots = scheduler.replicas * scheduler.max_num_seqs * config.parallel.decode_batches
    window = config.server.batch_window or num_slots
    room = max(window, num_slots)
    return structs.replace(
        config,
        server=structs.replace(config.server, batch_window=window),
        scheduler=structs.replace(scheduler, max_queue_len=min(scheduler.max_queue_len + room, MAX_NUMBER)),
    )


def with_resumable_streams(config: Config) -> Config:
    """Where requests outlive their engine, their streams can be resumed, and segments are short: each begins with
    a spool that has only what lives.
    """
    from msgspec import structs

    record, server = config.record, config.server
    if not record.recover:
        return config
    is_short = 0 < memory_bytes(record.record_segment) <= memory_bytes(_RECOVERY_SEGMENT)
    return structs.replace(
        config,
        record=record if is_short else structs.replace(record, record_segment=_RECOVERY_SEGMENT),
        server=structs.replace(server, resume_seconds=server.resume_seconds or _RECOVERY_RESUME_SECONDS),
    )


def _choose_record(config: Config) -> tuple[Config, list[str]]:
    """The folder to record to: the one asked for, else the state folder; a warning if nothing can be recorded there.

    Raises LogWriteError for a folder that was asked for and cannot be written.
    """
    from msgspec import structs

    from eventlm.bus.log_writer import LogWriteError, LogWriter
    from eventlm.config.state_folder import runs_folder
    from eventlm.system.disk import SYSTEM_DISK

    record = config.record.record
    folder = str(runs_folder()) if record == AUTO else record
    warnings = []
    try:
        if folder:
            LogWriter.check_folder(SYSTEM_DISK, folder)
    except LogWriteError as error:
        if record != AUTO or config.record.record_tokens or config.telemetry.otlp_endpoint:
            raise
        folder = ""
        warnings = [f"not recording: {error} with --record DIR"]
    return structs.replace(config, record=structs.replace(config.record, record=folder)), warnings


def _exposure(config: ServerConfig) -> list[str]:
    """Warnings for a server that others on the network can reach."""
    from eventlm.server.cors import is_loopback

    if is_loopback(config.host):
        return []
    address = f"{config.host or 'any address of this machine'}:{config.port}"
    warnings = []
    if not config.api_key and not config.api_keys_file:
        warnings.append(
            f"everyone who can reach {address} can use the server: set EVENTLM_API_KEY, or --api-keys-file FILE, "
            "or bind 127.0.0.1"
        )
    if not config.tls_cert:
        warnings.append(
            f"what goes to and from {address} can be read on its way, API keys too: give --tls-cert and --tls-key, or "
            "put a proxy that speaks TLS before it"
        )
    return warnings
