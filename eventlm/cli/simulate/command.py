"""`eventlm simulate`: a workload, an engine that is not there, and what would have come of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from eventlm.cli.parser import Parser
from eventlm.cli.simulate.flags import (
    COST_MODEL_HELP,
    WORKLOAD_HELP,
    Ingredients,
    add_engine_flags,
    load_ingredients,
    parse_speed_up,
)
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.replay.simulate.simulation import SimulationResult


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Run a workload through the scheduler of `eventlm serve`, with a virtual clock and a cost model in the place of
workers: no GPU and no model is needed, and an hour of traffic takes seconds. What is decided is what the
server would decide; how long a step takes is the cost model's word.

A WORKLOAD is a workload file, such as `eventlm trace import` makes of a public trace, or a recorded run, whose
requests are then sent again: at their times, turns of a conversation after the end of the one before."""
    parser.usage = "eventlm simulate WORKLOAD --cost-model MODEL [--policy SPEC] [flags]"
    parser.epilog = """\
examples:
  eventlm simulate W.jsonl --cost-model h200-llama3-8b
  eventlm simulate W.jsonl --cost-model h200-llama3-8b --policy lrs \\
    --batcher space_sharing --slo ttft=2000,tpot=50
  eventlm simulate runs/latest --cost-model runs/latest --replicas 2
  eventlm simulate W.jsonl --cost-model a100-llama3-8b --record sims
  eventlm replay sims/latest      (a simulated run is a trace like any other)

Requests longer than the context are rejected and counted. Latencies are of sequences that ran to their end."""
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("--cost-model", required=True, metavar="MODEL", help=COST_MODEL_HELP)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--speed-up-arrivals", default="1", metavar="X", help="bring arrivals closer together, 2: twice the load"
    )
    load.add_argument(
        "--closed-loop", type=int, default=0, metavar="N",
        help="N clients send one request after the other, whatever the workload's times",
    )  # fmt: skip
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo", default="", metavar="LIMITS", help="ttft=MS,tpot=MS,e2e=MS of requests that bring none"
    )
    results.add_argument("--record", metavar="DIR", help="write the run's trace to DIR/<run>/trace.jsonl")
    results.add_argument("--json", action="store_true", help="print one JSON object, times in nanoseconds")
    results.add_argument("--plot", metavar="DIR", help="write pictures (PNG) to this folder")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print what came of it."""
    speed_up_ppm = parse_speed_up(arguments.speed_up_arrivals, "--speed-up-arrivals")
    if arguments.closed_loop < 0:
        raise UsageError(f"--closed-loop {arguments.closed_loop}: 1 client or more, or 0 for none")
    if arguments.closed_loop and speed_up_ppm != 1_000_000:
        raise UsageError("--closed-loop sends requests when others have ended: leave --speed-up-arrivals out")
    # Only now: a mistake in the flags need not wait for the core and the policies to be loaded.
    from eventlm.cli.progress import count_progress
    from eventlm.config.objectives import parse_objectives
    from eventlm.metrics.trace_metrics import StatsCollector
    from eventlm.replay.simulate.simulation import simulate

    objectives = parse_objectives(arguments.slo) if arguments.slo else None
    ingredients = load_ingredients(arguments)
    stats = StatsCollector() if arguments.plot is not None else None
    workload = ingredients.workload.sped_up(speed_up_ppm)
    with count_progress("simulating", "request", is_long=len(workload.requests) > 500) as on_progress:
        result = simulate(
            workload,
            ingredients.engine.setup,
            ingredients.cost,
            predictor=ingredients.engine.predictor,
            closed_loop=arguments.closed_loop,
            objectives=objectives,
            record=arguments.record,
            subscribers=[stats.see] if stats is not None else [],
            on_progress=on_progress,
        )
    _print(result, ingredients, arguments)
    if stats is not None:
        _draw(stats.stats(path="", num_bytes=0, warnings=[]), arguments.plot)
    return 0


def _print(result: SimulationResult, ingredients: Ingredients, arguments: argparse.Namespace) -> None:
    from eventlm.cli.simulate.report import as_object, render

    if arguments.json:
        import msgspec

        print(msgspec.json.encode(as_object(result, ingredients.engine.notes)).decode())
        return
    load = [f"x {arguments.speed_up_arrivals}"] if arguments.speed_up_arrivals != "1" else []
    load += [f"closed loop of {arguments.closed_loop}"] if arguments.closed_loop else []
    lines = render(
        result,
        workload=", ".join([ingredients.workload.source, *load]),
        cost_model=arguments.cost_model,
        slo=arguments.slo,
        notes=ingredients.engine.notes,
    )
    print("\n".join(lines))


def _draw(stats: object, folder: str) -> None:
    import sys

    from eventlm.cli.trace.plots import plot

    for picture in plot(stats, folder, in_clock_time=False):  # type: ignore[arg-type]
        print(picture, file=sys.stderr)
