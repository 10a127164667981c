"""What `eventlm serve` tells a person or a program when it is ready and when it ends."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventlm._version import __version__
from eventlm.config import Config, ServerConfig
from eventlm.config.load import API_KEY_VARIABLE
from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.formatting import counted

if TYPE_CHECKING:
    from eventlm.engine.inference_engine import InferenceEngine
    from eventlm.engine.setup import EngineSetup

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


def announce_ready(url: str, engine: InferenceEngine) -> None:
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
            **all_models(models),
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


def all_models(models: Sequence[str]) -> dict[str, Sequence[str]]:
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


def announce_end(num_requests: int, config: Config) -> None:
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
