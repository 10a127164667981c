"""`eventlm replay`: verify a recorded run, as it was or under a change."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from eventlm.cli import replay_execute
from eventlm.cli.parser import Parser
from eventlm.cli.progress import file_progress
from eventlm.cli.trace_path import HELP, LATEST, trace_file
from eventlm.config.plugin_spec import parse_parameters, parse_plugin_spec
from eventlm.errors import UsageError

PLUGIN_KINDS = ("policy", "batcher", "router")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Verify a recorded run: feed its facts to the core and compare every decision byte for byte. Stops\n"
        "at the first that differs and tells what led to it. With --verify the same is done under a change,\n"
        "to see the first decision that it would have altered. Tokens are not checked, for the core never\n"
        "sees them, unless --execute runs the recorded steps on the model again."
    )
    parser.epilog = """\
examples:
  eventlm replay                 the newest run of a server
  eventlm replay runs/latest     the newest run of `serve --record runs`
  eventlm replay runs/latest --verify --policy edf:multiplier=2
  eventlm replay runs/latest --verify --set max_num_batched_tokens=512
  eventlm replay runs/latest --execute   on the model again, token by token

exit codes: 0 verified, 2 usage, 3 damaged, 4 torn (with --strict),
            10 divergence, 11 safety invariant, 12 liveness,
            13 written by another version, 14 gap"""
    parser.add_argument("trace", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
    parser.add_argument("--verify", action="store_true", help="verify under the changes given by the flags below")
    for kind in PLUGIN_KINDS:
        parser.add_argument(f"--{kind}", metavar="SPEC", help=f"another {kind}, such as `eventlm policies` lists")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="another value of the core's configuration, such as max_num_batched_tokens=512; may be repeated",
    )
    parser.add_argument(
        "--trust-local-plugins",
        action="store_true",
        help="import the plug-ins that the trace names as module:Class; do so only for traces that you trust",
    )
    parser.add_argument("--strict", action="store_true", help="a torn last line is an error (exit 4)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    replay_execute.configure(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print how many decisions were verified, or the divergence; returns 0 or the code of what went wrong."""
    specs = {kind: getattr(arguments, kind) for kind in PLUGIN_KINDS if getattr(arguments, kind) is not None}
    replay_execute.check(arguments)
    if arguments.execute:
        if specs or arguments.assignments or arguments.verify:
            raise UsageError("--execute runs what was recorded as it was: --verify and changes do not go with it")
        return replay_execute.run(arguments)
    if (specs or arguments.assignments) and not arguments.verify:
        first = f"--{next(iter(specs))}" if specs else "--set"
        raise UsageError(
            f"{first} needs --verify: `eventlm replay TRACE --verify {first} ...` finds the first decision "
            "that the change would have altered"
        )
    changed_plugins = {kind: parse_plugin_spec(text) for kind, text in specs.items()}
    settings = _assignments(arguments.assignments)
    # Only now: a usage error need not wait for the core and the policies to be loaded.
    from eventlm.replay.rebuild import Changes
    from eventlm.replay.report import render, render_json
    from eventlm.replay.verify import verify

    changes = Changes(settings=settings, trust_local_plugins=arguments.trust_local_plugins, **changed_plugins)
    path = trace_file(arguments.trace)
    with file_progress("verifying", path) as on_progress:
        result = verify(path, changes=changes, strict=arguments.strict, on_progress=on_progress)
    print(render_json(result) if arguments.json else render(result))
    for warning in result.warnings:
        print(f"eventlm: warning: {warning}", file=sys.stderr)
    return result.exit_code


def _assignments(texts: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for text in texts:
        for key, value in parse_parameters(text).items():
            if key in changes:
                raise UsageError(f"--set gives {key} twice")
            changes[key] = value
    return changes
