"""`eventlm replay`: verify a recorded run, as it was or under a change, or ask what another engine would have done."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import READING_A_TRACE, Parser, exit_code_lines
from eventlm.cli.replay import execute as replay_execute
from eventlm.cli.replay import what_if as replay_what_if
from eventlm.cli.replay.replicasets import (
    CHANGES,
    MODEL,
    PLUGIN_KINDS,
    SHORT_NAMES,
    add_replicaset_flag,
    changes_of,
    once,
    parse_replicasets,
)
from eventlm.cli.trace_path import HELP, LATEST, add_strict_flag, add_trust_flag, trace_file
from eventlm.config.plugin_spec import parse_parameters, parse_plugin_spec
from eventlm.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from eventlm.replay.rebuild import SetChanges


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Verify a recorded run: feed its facts to the core and compare every decision byte for byte. Stops\n"
        "at the first that differs and shows what led to it. With --verify the same is done under a change,\n"
        "to see the first decision that it would have altered. Tokens are not checked, because the\n"
        "core never gets them, unless --execute runs the recorded steps on the model again.\n\n"
        "With another policy, batcher, router, setting, number of replicas or load: a what-if. The recorded\n"
        "work runs through that engine, and a table shows the result, with error bars."
    )
    parser.epilog = """\
examples:
  eventlm replay                 the newest run of a server
  eventlm replay runs/latest     the newest run of `serve --record runs`
  eventlm replay runs/latest --policy edf --policy lrs
                                 what two other policies would have done
  eventlm replay runs/latest --replicas 1 --replicas 2 \\
      --speed-up-arrivals 1.5 --slo ttft=500,tpot=100 --plot pictures
  eventlm replay --policy edf --from 14:05 --to 14:06
                                 and only for the requests of that minute
  eventlm replay --replicaset small:policy=edf,replicas=2
                                 one replicaset of several
  eventlm replay runs/latest --verify --policy edf:multiplier=2
  eventlm replay runs/latest --verify --set max_num_batched_tokens=512
  eventlm replay runs/latest --execute   on the model again, token by token
  eventlm replay --execute --replicaset small:model=checkpoints/small

""" + exit_code_lines(
        *READING_A_TRACE, ExitCode.FAILED, ExitCode.DIFFERENT, ExitCode.INVARIANT, ExitCode.LIVENESS, ExitCode.GAP
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", default=LATEST, help=HELP)
    parser.add_argument("--verify", action="store_true", help="verify under the changes given by the flags below")
    for kind in PLUGIN_KINDS:
        parser.add_argument(
            f"--{kind}",
            metavar="SPEC",
            action="append",
            help=f"another {kind}, such as `eventlm policies` lists",
        )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="another value of the core's configuration, such as blocks=2048 or max_num_batched_tokens=512; may be "
        "repeated",
    )
    add_replicaset_flag(parser, may="in a what-if replicas and cost_model, and ")
    add_trust_flag(parser)
    add_strict_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    replay_what_if.configure(parser)
    replay_execute.configure(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print how many decisions were verified, the divergence, or what a change would have led to; returns 0 or the code
    of what went wrong.
    """
    specs = {kind: getattr(arguments, kind) for kind in PLUGIN_KINDS if getattr(arguments, kind) is not None}
    replay_execute.check(arguments)
    settings = parse_settings(arguments.assignments)
    of_sets = parse_replicasets(arguments.replicasets)
    what_if_flag = replay_what_if.asked_for(arguments)
    if arguments.execute:
        if specs or settings or what_if_flag or arguments.verify:
            raise UsageError("--execute runs what was recorded as it was: --verify and changes do not go with it")
        return replay_execute.run(arguments, once(of_sets, "--execute", allowed=[MODEL]))
    if not arguments.verify and (specs or settings or of_sets or what_if_flag):
        return replay_what_if.run(arguments, specs, settings, of_sets)
    if what_if_flag:
        raise UsageError(f"{what_if_flag} is for a what-if; it does not go with --verify")
    own = changes_of(once(of_sets, "--verify", allowed=[CHANGES]))
    return _verify(arguments, specs, settings, own)


def _verify(
    arguments: argparse.Namespace,
    specs: dict[str, list[str]],
    settings: dict[str, Any],
    of_sets: dict[str, SetChanges],
) -> int:
    for kind, texts in specs.items():
        if len(texts) > 1:
            raise UsageError(f"--verify takes one --{kind}, not {len(texts)}; several make a what-if without --verify")
    changed_plugins = {kind: parse_plugin_spec(texts[0]) for kind, texts in specs.items()}
    from eventlm.replay.rebuild import Changes
    from eventlm.replay.verify.report import render, render_json
    from eventlm.replay.verify.verifier import verify

    changes = Changes(
        settings=settings,
        of_sets=of_sets,
        trust_local_plugins=arguments.trust_local_plugins,
        **changed_plugins,
    )
    path = trace_file(arguments.trace)
    with file_progress("verifying", path) as on_progress:
        result = verify(path, changes=changes, strict=arguments.strict, on_progress=on_progress)
    print(render_json(result) if arguments.json else render(result))
    warn(result.warnings)
    return result.exit_code


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """The fields of the core's configuration that several --set give. Raises UsageError for one that comes twice."""
    changes: dict[str, Any] = {}
    for text in texts:
        for name, value in parse_parameters(text).items():
            key = SHORT_NAMES.get(name, name)
            if key in changes:
                raise UsageError(f"--set gives {key} twice")
            changes[key] = value
    return changes
