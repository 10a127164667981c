"""`eventlm replay TRACE --policy edf ...`: what another engine would have done with a run's work."""

from __future__ import annotations

import argparse
import contextlib
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

from eventlm.cli.output import count_progress, is_long, warn
from eventlm.cli.parser import Parser, add_number
from eventlm.cli.replay.replicasets import (
    CHANGES,
    COST_MODEL,
    REPLICAS,
    OwnChanges,
    changes_of,
    check_keys,
    read_cost_models,
)
from eventlm.cli.simulate.flags import parse_speed_up
from eventlm.cli.time_window import add_window_flags, parse_window
from eventlm.cli.trace_path import trace_file
from eventlm.config.objectives import parse_objectives
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.replay.what_if.engine import Alternative

#: Flags that ask for an alternative, and flags for how it is measured and shown.
ALTERNATIVES = ("replicas", "speed_up_arrivals", "closed_loop")
MEASURES = ("slo", "cost_model", "plot", "output", "from_time", "to_time")


def configure(parser: Parser) -> None:
    """Add the flags of a what-if."""
    group = parser.add_argument_group(
        "what-if",
        "another engine for the recorded work: its own core with modelled step times. --policy, --batcher, --router, "
        "--replicas and a --replicaset of one name may be repeated; every combination is an alternative, and all else "
        "applies to all of them",
    )
    add_number(group, "--replicas", "number of replicas, each with a device or cores of its own", action="append")
    group.add_argument(
        "--speed-up-arrivals", metavar="FACTOR", help="bring arrivals closer together: 1.5, or 0.5 to spread them"
    )
    text = "N clients send the requests one after the other, whatever the times of the run"
    add_number(group, "--closed-loop", text, least=1)
    group.add_argument("--slo", metavar="LIMITS", help="ttft=MS,tpot=MS,e2e=MS for requests that bring no limits")
    group.add_argument(
        "--cost-model",
        metavar="FILE",
        help="times of steps from a TOML file, a built-in model (`eventlm simulate --help` lists them), or fitted to "
        "another trace",
    )
    add_window_flags(group)
    group.add_argument("--plot", metavar="DIR", help="write pictures (PNG) to this folder")
    group.add_argument("--output", metavar="DIR", help="write the trace of each alternative to this folder")


def asked_for(arguments: argparse.Namespace) -> str:
    """The first flag that only a what-if has; empty if there is none."""
    for name in (*ALTERNATIVES, *MEASURES):
        if getattr(arguments, name) is not None:
            return f"--{name.removesuffix('_time').replace('_', '-')}"
    return ""


def run(
    arguments: argparse.Namespace,
    specs: dict[str, list[str]],
    settings: dict[str, Any],
    of_sets: dict[str, list[OwnChanges]],
) -> int:
    """Print the table; `specs` are those of each kind of plug-in, `settings` of the core's configuration, `of_sets` of
    single replicasets.
    """
    for name, each in of_sets.items():
        for own in each:
            check_keys(name, own, "a what-if", allowed=[CHANGES, REPLICAS, COST_MODEL])
    alternatives = _alternatives(arguments, specs, settings, of_sets)
    if not any(each.describe() for each in alternatives):
        raise UsageError(
            f"{asked_for(arguments) or '--replicaset'} needs an alternative to what was recorded, such as --policy edf "
            "or --replicas 2"
        )
    objectives = parse_objectives(arguments.slo) if arguments.slo is not None else None
    from eventlm.replay.what_if.report import render, render_json
    from eventlm.replay.what_if.what_if import what_if

    path = trace_file(arguments.trace)
    window = parse_window(arguments, path)
    with contextlib.ExitStack() as bars:
        result = what_if(
            path,
            alternatives,
            objectives=objectives,
            cost_models=read_cost_models(path, arguments.cost_model, of_sets),
            output=arguments.output,
            window=window,
            strict=arguments.strict,
            trust_local_plugins=arguments.trust_local_plugins,
            on_progress=StageProgress(bars) if is_long(path) else None,
        )
    print(render_json(result) if arguments.json else render(result))
    warn(result.warnings)
    if arguments.plot is not None:
        from eventlm.cli.replay.what_if_plots import plot

        for picture in plot(result, arguments.plot):
            print(picture, file=sys.stderr)
    return 0


def _alternatives(
    arguments: argparse.Namespace,
    specs: dict[str, list[str]],
    settings: dict[str, Any],
    of_sets: dict[str, list[OwnChanges]],
) -> list[Alternative]:
    from eventlm.replay.rebuild import Changes
    from eventlm.replay.what_if.engine import Alternative

    speed_up = "1" if arguments.speed_up_arrivals is None else arguments.speed_up_arrivals
    speed_up_ppm = parse_speed_up(speed_up, "--speed-up-arrivals")
    by_kind = [[(kind, parse_plugin_spec(text)) for text in dict.fromkeys(texts)] for kind, texts in specs.items()]
    replicas = dict.fromkeys(arguments.replicas) if arguments.replicas is not None else [None]
    found = []
    for own in product(*of_sets.values()):
        named = dict(zip(of_sets, own, strict=True))
        of_set = {name: each.num_replicas for name, each in named.items() if each.num_replicas is not None}
        found += [
            Alternative(
                changes=Changes(
                    settings=settings,
                    of_sets=changes_of(named),
                    trust_local_plugins=arguments.trust_local_plugins,
                    **dict(chosen),
                ),
                num_replicas=num_replicas,
                replicas_of_sets=of_set,
                speed_up_ppm=speed_up_ppm,
                closed_loop=arguments.closed_loop or 0,
            )
            for *chosen, num_replicas in product(*by_kind, replicas)
        ]
    return found


class StageProgress:
    """A progress bar for each stage."""

    def __init__(self, bars: contextlib.ExitStack) -> None:
        self._bars = bars
        self._stage = ""
        self._advance: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._bars.close()
            self._stage = stage
            self._advance = self._bars.enter_context(count_progress(stage, "byte" if stage == "reading" else "request"))
        if self._advance is not None:
            self._advance(done, total)
