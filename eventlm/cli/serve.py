"""`eventlm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse

from eventlm.cli.config_flags import add_config_flags, config_from_arguments, print_config
from eventlm.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve a model over an OpenAI-compatible HTTP API: /v1/chat/completions, /v1/completions,\n"
        "/v1/models, /health, /version. Without --model it is the default model, fetched at its first use.\n"
        "SIGTERM and Ctrl-C let running requests end, for up to --drain-seconds."
    )
    parser.usage = "eventlm serve [--model MODEL] [--record DIR] [flags]"
    parser.epilog = """\
examples:
  eventlm serve                                               the default model on 127.0.0.1:8000
  eventlm serve --model ~/models/Qwen3-0.6B --record runs     a checkpoint folder, with a trace of the run
  eventlm serve --policy edf:multiplier=2,min_deadline_ms=300 --replicas 2
  eventlm serve --max-model-len 4096 --print-config > eventlm.toml && eventlm serve --config eventlm.toml

A SPEC is NAME or NAME:PARAMETER=VALUE,...; `eventlm policies` lists the names."""
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns 0 after a clean end."""
    config = config_from_arguments(arguments)
    if arguments.print_config:
        return print_config(config)
    raise SystemExit("serve")
