"""`eventlm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventlm._version import __version__
from eventlm.cli.config_flags import add_config_flags, add_model_argument, with_config
from eventlm.cli.engine_command import StopSignals
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.config import Config, ServerConfig
from eventlm.config.core import MAX_NUMBER
from eventlm.config.load import API_KEY_VARIABLE
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.config.structs import AUTO
from eventlm.errors import ExitCode
from eventlm.formatting import counted
from eventlm.system.collector import lasting_objects

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine
    from eventlm.engine.setup import EngineSetup
    from eventlm.launchers.launcher import StartedRank
    from eventlm.system.system import System

#: Facts about a worker's host in the log line of a ready server.
_MACHINERY = ("gpu", "attention_backend", "threads")
_TRY = """\
curl {url}/v1/chat/completions -H 'content-type: application/json'{authorization} \\
  -d {body}"""
_QUESTION = {"role": "user", "content": "What is the capital of Japan?"}
#: With a variable that the shell fills in: the key itself is never shown.
_AUTHORIZATION = ' \\\n  -H "Authorization: Bearer ${variable}"'
#: Where no variable has it yet; to a shell this is a comment.
_KEY_FROM_FILE = "# first put one of the keys of --api-keys-file into K\n"
_KEY_FROM_CONFIG = "# first put the server's API key into K\n"
#: Open files for everything but connections: the trace, sockets to workers, libraries.
_OTHER_FILES = 256


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve a model over the APIs of OpenAI (/v1/chat/completions, /v1/responses, /v1/conversations,\n"
        "/v1/completions, /v1/embeddings, /v1/models, and with --batch-dir /v1/files and /v1/batches), Anthropic\n"
        "(/v1/messages), vLLM (/tokenize, /pooling and others), llama.cpp (/completion, /props and others) and\n"
        "Ollama (/api/chat and others), with a chat page at / and a dashboard at /dashboard. /openapi.json describes\n"
        "all of it; /health, /metrics and /version are for monitors.\n"
        "Operators have /admin/status, drain, pause, resume, policy, cache/flush, requests/ID/abort and backends,\n"
        "with a key of the scope admin.\n"
        "Without MODEL it is the default model, fetched at its first use. With --backend other servers run the model,\n"
        "and this one schedules and records their requests.\n\n"
        "Every run is recorded in $EVENTLM_STATE/runs, by default ~/.local/state/eventlm/runs, or in --record DIR;\n"
        "`eventlm replay` verifies the newest.\n\n"
        "SIGTERM and Ctrl-C let running requests end, for up to --drain-seconds; a second one ends them.\n"
        "SIGHUP reads the API keys and the TLS certificate again."
    )
    parser.usage = "eventlm serve [MODEL] [--record DIR | --no-record] [flags]"
    parser.epilog = """\
examples:
  eventlm serve                       the default model on 127.0.0.1:8000
  eventlm serve ~/models/Qwen3-0.6B --record runs
  eventlm serve --policy edf:multiplier=2,min_deadline_ms=300 --replicas 2
  eventlm serve --service-class gold:priority=-10,deadline_ms=500
  eventlm serve --replicaset small:model=smollm2,replicas=2
                                      a further model in the same server
  eventlm serve --backend http://10.0.0.2:8000 --backend http://10.0.0.3:8000
                                      in front of other servers (vLLM, SGLang,
                                      llama.cpp, ...), which run the model
  eventlm serve --api-servers 4       HTTP and tokenizing in four processes
  eventlm serve --batch-dir batches   files of requests, at the lowest priority
  eventlm serve --otlp-endpoint http://127.0.0.1:4318
                                      spans of all requests for a collector
  eventlm serve --resume-seconds 60   streams go on where a connection broke
  eventlm serve --host 0.0.0.0 --api-keys-file keys.toml \\
      --tls-cert cert.pem --tls-key key.pem
  eventlm serve --max-model-len 4096 --print-config > eventlm.toml
  eventlm serve --config eventlm.toml

A SPEC is NAME or NAME:PARAMETER=VALUE,...; `eventlm policies` lists the names.

keys.toml, which only you may read:
  [[keys]]
  name = "alice"
  sha256 = "..."                      of the key: printf %s KEY | sha256sum
                                      (or the key itself: key = "...")
  scopes = ["inference"]              or "admin", or both
  limits = { requests_per_minute = 60, tokens_per_minute = 100_000 }

A service manager may start it again after 1, which can pass (a crash, no
network), but not after 2, which stays until a flag or a file is changed.

""" + exit_code_lines(ExitCode.USAGE, meanings={ExitCode.OK: "ended by a signal", ExitCode.FAILED: "it failed"})
    add_model_argument(parser)
    add_config_flags(parser)
    parser.set_defaults(run=with_config(run))


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns 0 after a clean end."""
    import uvloop

    uvloop.run(_serve(config))
    return 0


async def _serve(config: Config) -> None:
    from msgspec import structs

    from eventlm.config.replicasets import configs_of_replicasets
    from eventlm.engine.plugins.launchers import resolve_launcher
    from eventlm.engine.setup import num_own_workers, resolve_plugins
    from eventlm.launchers.spawned_worker import spawned_ahead
    from eventlm.system.processors import usable_cores
    from eventlm.system.system import real_system
    from eventlm.worker.protocol import FAKE_MODEL

    system = real_system()
    # A mistake in them is found before there are processes to end.
    configs = list(configs_of_replicasets(config).values())
    for own in configs:
        resolve_plugins(own.scheduler)
    with_workers = [own for own in configs if num_own_workers(own)]
    launchers = [resolve_launcher(own.parallel.launcher) for own in with_workers]
    # Workers inherit the limit.
    server, few_files = raise_file_limit(config.server, forwards=any(own.gateway.backend for own in configs))
    config = structs.replace(config, server=server)
    # They load torch, which takes as long as everything else up to the engine's start, and a core each.
    num_workers = 0
    if all(launcher.is_local for launcher in launchers) and with_workers and with_workers[0].model.model != FAKE_MODEL:
        num_workers = min(sum(map(num_own_workers, with_workers)), usable_cores())
    async with spawned_ahead(system, num_workers, "torch") as spawned:
        await _serve_with(system, config, few_files, spawned)


async def _serve_with(system: System, config: Config, few_files: list[str], spawned: Sequence[StartedRank]) -> None:
    with lasting_objects():
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
        from eventlm.server.http_server import check_config, run_server
        from eventlm.server.scheduling import check_key_classes

    configure_logging(config.log)
    log = structlog.get_logger("eventlm.serve")
    # All that can be wrong is found before a model is fetched.
    await check_config(config.server)
    keys = ApiKeys(system, config.server)
    check_file(config.server)
    if config.server.batch_dir:
        BatchFolder(system, config.server)
    config, no_record = _choose_record(with_room_for_batches(config))
    asked = await ask_backends(config, HttpBackend)
    engine, tokenizer, defaults, vocab_size, facts, warnings, others = compose(config, all_sets=True, backends=asked)
    for warning in [*no_record, *few_files, *warnings, *_exposure(config.server)]:
        log.warning(warning)
    text = TextParts(tokenizer, defaults, facts, engine.setup.forwards)
    context = make_context(system, engine, engine.setup.config, text, vocab_size=vocab_size, keys=keys, others=others)
    for warning in check_key_classes(context):
        log.warning(warning)
    front_ends = None
    if config.server.api_servers:
        front_ends = ServerWithFrontEnds(system, engine, module="eventlm.cli.serve.front_end")
    with StopSignals(on_hangup=(front_ends or context).reload) as signals:
        serving: dict[str, Any] = {
            "on_listening": lambda url: log.info(
                "loading", url=url, model=engine.setup.model or engine.model_names[0], **_all_models(engine.model_names)
            ),
            "on_ready": lambda url: _begin(url, engine),
            "on_draining": lambda num_requests: _announce_end(num_requests, config),
            "load": lambda: engine.start(spawned=spawned),
            "stop": signals.stop,
            "cut": signals.cut,
        }
        try:
            if front_ends is not None:
                await front_ends.run(**serving)
            else:
                await run_server(context, **serving)
        finally:
            await engine.stop()
    log.info("stopped")


def with_room_for_batches(config: Config) -> Config:
    """Batches get their window, and room in the queue for that or for the largest line, so that nobody else is refused
    because of them.
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


def raise_file_limit(config: ServerConfig, *, forwards: bool) -> tuple[ServerConfig, list[str]]:
    """Let this process and its children open as many files as there may be connections; where the system's limit is
    lower, a configuration of fewer connections and a warning. forwards: to backends, over connections of this process.

    Shells allow a process 1,024 files although the system would give it many more.
    """
    from msgspec import structs

    # With front ends, those of clients are not in this process.
    num_each = 2 if forwards and not config.api_servers else 1
    needed = num_each * config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return config, []
    fewer = max((allowed - _OTHER_FILES) // num_each, 1)
    warning = (
        f"at most {fewer} connections: --max-connections {config.max_connections} needs {needed} open files and the "
        f"system allows {hard}; raise that (ulimit -Hn) or lower the connections"
    )
    return structs.replace(config, max_connections=fewer), [warning]


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


def _begin(url: str, engine: InferenceEngine) -> None:
    # Loaded objects stay alive: without the freeze each full collection would stop all streams for 20 ms.
    gc.collect()
    gc.freeze()
    _announce(url, engine)


def _announce(url: str, engine: InferenceEngine) -> None:
    """Announce that the server is ready, in prose on a terminal, else in the log."""
    setup = engine.setup
    models = engine.model_names
    model = models[0]
    record = str(engine.run_folder / "trace.jsonl") if engine.run_folder is not None else ""
    hint = _hint(url, model, setup.config.server)
    scheduler = setup.config.scheduler
    plugins = {kind: format_plugin_spec(getattr(scheduler, kind)) for kind in ("policy", "batcher", "router")}
    kv_memory, host, num_slots = _kv_memory(engine), engine.worker_host, setup.core.state_slots or 0
    num_ranks = setup.layout.num_ranks
    if not _is_read_by_a_person(setup.config):
        import structlog

        is_text = setup.config.log.log_format == "text"
        structlog.get_logger("eventlm.serve").info(
            "ready",
            url=url,
            model=model,
            **_all_models(models),
            max_model_len=engine.max_model_len,
            **({"kv_memory": kv_memory} if kv_memory else {}),
            num_blocks=setup.core.num_blocks,
            **({"state_slots": num_slots} if num_slots else {}),
            # Replicas are on several GPUs, each with its number.
            device=host["device"].partition(":")[0],
            **{name: host[name] for name in _MACHINERY if name in host},
            replicas=sum(map(_num_replicas, engine.setups)),
            **({"ranks": num_ranks} if num_ranks > 1 else {}),
            api_servers=setup.config.server.api_servers,
            record=record,
            **({} if is_text else {"hint": hint}),
            **plugins,
        )
        if is_text:
            # As a field of a text line it would be quoted, and could not be pasted into a shell.
            print(f"try it:\n{hint}", file=sys.stderr)
        return
    num_front_ends = setup.config.server.api_servers
    processes = f"{_replicas(engine.setups)}{_machinery(host)}"
    processes += f", front ends {num_front_ends}" if num_front_ends else ""
    chosen = ", ".join(f"{kind} {name}" for kind, name in plugins.items())
    lines = [
        f"eventlm {__version__} serves {' and '.join(models)} on {url}",
        f"{processes}, {chosen}, context {engine.max_model_len} tokens"
        + (f", KV cache {kv_memory} in {counted(setup.core.num_blocks, 'block')} each" if kv_memory else "")
        + (f", {counted(num_slots, 'state slot')} each" if num_slots else ""),
        f"recording to {record}" if record else "not recording; --record DIR keeps a trace of the run",
        *([f"chat with it in a browser: {url}"] if setup.config.server.ui else []),
        "try it:",
        *hint.splitlines(),
    ]
    print("\n".join(lines), file=sys.stderr)


def _all_models(models: Sequence[str]) -> dict[str, Sequence[str]]:
    """A field of the log for the models of an engine that has several."""
    return {"models": models} if len(models) > 1 else {}


def _num_replicas(setup: EngineSetup) -> int:
    """How many a replicaset has; backends that may be added later do not count."""
    return len(setup.backends) if setup.forwards else setup.core.num_replicas


def _replicas(setups: Sequence[EngineSetup]) -> str:
    """How many each replicaset has, and of how many ranks."""
    counts = []
    for setup in setups:
        num_ranks = setup.layout.num_ranks
        count = counted(_num_replicas(setup), "backend") if setup.forwards else f"{_num_replicas(setup)}"
        counts.append(count + (f" of {num_ranks} ranks" if num_ranks > 1 else ""))
    return ("" if setups[0].forwards else "replicas ") + " and ".join(counts)


def _machinery(host: Mapping[str, Any]) -> str:
    """What computes a replica, in words; empty for the fake model."""
    if "attention_backend" not in host:
        return ""
    if "gpu" in host:
        return f" on {host['gpu']} with attention backend {host['attention_backend']}"
    return f" on the processor with {counted(host['threads'], 'thread')} each, backend {host['attention_backend']}"


def _kv_memory(engine: InferenceEngine) -> str:
    """The memory of a replica's KV blocks; empty for a model that stores no keys and values."""
    core = engine.setup.core
    num_bytes = core.num_blocks * core.block_size * int(engine.worker_host.get("kv_token_bytes", 0))
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes else ""


def _hint(url: str, model: str, server: ServerConfig) -> str:
    """A first request for a shell, with the source of the key if one is needed."""
    first, authorization = "", ""
    if server.api_key and server.api_key == os.environ.get(API_KEY_VARIABLE):
        authorization = _AUTHORIZATION.format(variable=API_KEY_VARIABLE)
    elif server.api_key or server.api_keys_file:
        first = _KEY_FROM_CONFIG if server.api_key else _KEY_FROM_FILE
        authorization = _AUTHORIZATION.format(variable="K")
    body = {"model": model, "messages": [_QUESTION], "temperature": 0, "stream": True}
    quoted = shlex.quote(json.dumps(body, separators=(",", ":")))
    return first + _TRY.format(url=url, authorization=authorization, body=quoted)


def _is_read_by_a_person(config: Config) -> bool:
    """Whether announcements are prose: on a terminal, unless JSON was asked for."""
    return sys.stderr.isatty() and config.log.log_format != "json"


def _announce_end(num_requests: int, config: Config) -> None:
    """Announce what the server waits for before it ends, and on a terminal how to cut that short."""
    drain_seconds = config.server.drain_seconds
    if not _is_read_by_a_person(config):
        import structlog

        structlog.get_logger("eventlm.serve").info(
            "shutting down", num_requests=num_requests, drain_seconds=drain_seconds
        )
    elif not num_requests:
        print("shutting down: no request is running", file=sys.stderr)
    else:
        print(
            f"shutting down: waiting up to {drain_seconds} s for {counted(num_requests, 'request')}; "
            f"a second Ctrl-C ends {'it' if num_requests == 1 else 'them'} at once",
            file=sys.stderr,
        )
