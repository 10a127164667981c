"""`eventlm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse

from eventlm.cli.config_flags import add_config_flags, add_model_argument, given_options, with_config
from eventlm.cli.engine_command import StopSignals
from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.config import Config
from eventlm.errors import ExitCode


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve a model over the APIs of OpenAI (/v1/chat/completions, /v1/responses, /v1/conversations,\n"
        "/v1/completions, /v1/embeddings, /v1/models, and with --batch-dir /v1/files and /v1/batches), Anthropic\n"
        "(/v1/messages), vLLM (/tokenize, /pooling and others), llama.cpp (/completion, /props and others) and\n"
        "Ollama (/api/chat and others), with a chat page at / and a dashboard at /dashboard. /openapi.json describes\n"
        "all of it; /health, /metrics and /version are for monitors.\n"
        "Operators have /admin/status, drain, pause, resume, restart, policy, cache/flush, requests/ID/abort and\n"
        "backends, with a key of the scope admin.\n"
        "Without MODEL it is the default model, fetched at its first use. With --backend other servers run the model,\n"
        "and this one schedules and records their requests.\n\n"
        "Every run is recorded in $EVENTLM_STATE/runs, by default ~/.local/state/eventlm/runs, or in --record DIR;\n"
        "`eventlm replay` verifies the newest.\n\n"
        "SIGTERM and Ctrl-C let running requests end, for up to --drain-seconds; a second one ends them.\n"
        "SIGHUP reads the API keys and the TLS certificate again. With --recover, an engine that dies is followed by\n"
        "another one, and SIGUSR2 or /admin/restart lets one with the code and the configuration that are on the disk\n"
        "take over."
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

    if config.record.recover:
        return uvloop.run(_keep(config, arguments))
    uvloop.run(_serve(config))
    return ExitCode.OK


async def _serve(config: Config) -> None:
    """Serve in this process."""
    from eventlm.cli.serve.server import begun, compose_server
    from eventlm.system.system import real_system

    system = real_system()
    async with begun(system, config) as beginning:
        server = await compose_server(system, beginning)
        with StopSignals(on_hangup=server.reload) as signals:
            await server.run(beginning, stop=signals.stop, cut=signals.cut)


async def _keep(config: Config, arguments: argparse.Namespace) -> int:
    """Let this process be the keeper of another one that serves; returns the exit code."""
    from eventlm.cli.logging_setup import configure_logging
    from eventlm.keeper.keeper import Keeper
    from eventlm.keeper.protocol import ConfigSource
    from eventlm.system.system import real_system

    configure_logging(config.log)
    system = real_system()
    system.processes.adopt_orphans()
    source = ConfigSource(arguments.config, given_options(arguments))
    keeper = Keeper(
        system,
        config,
        source,
        module="eventlm.cli.serve.engine",
        front_end_module="eventlm.cli.serve.front_end",
    )
    with StopSignals(on_hangup=keeper.reload, on_restart=keeper.restart) as signals:
        return await keeper.run(signals.stop, signals.cut)
