"""`eventlm simulate`: run a workload through the scheduler with a cost model."""

from __future__ import annotations

import argparse
import sys

from eventlm.cli.parser import Parser, add_number
from eventlm.cli.simulate.flags import (
    COST_MODEL_HELP,
    WORKLOAD_HELP,
    add_engine_flags,
    add_replicaset_flag,
    load_ingredients,
    parse_speed_up,
)
from eventlm.errors import UsageError


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Run a workload through the scheduler of `eventlm serve`, with a virtual clock and a cost model in the place of
workers: no GPU and no model is needed, and an hour of traffic takes seconds. Decisions are those of the server;
times of steps are the cost model's.

A WORKLOAD is a workload file, such as `eventlm trace import` makes of a public trace, or a recorded run, whose
requests are then sent again: at their times, turns of a conversation after the end of the one before."""
    parser.usage = "eventlm simulate WORKLOAD --cost-model MODEL [--policy SPEC] [flags]"
    parser.epilog = """\
examples:
  eventlm simulate W.jsonl --cost-model h200-llama3-8b
  eventlm simulate W.jsonl --cost-model h200-llama3-8b --policy lrs \\
    --batcher space_sharing --slo ttft=2000,tpot=50
  eventlm simulate runs/latest --cost-model runs/latest --replicas 2
  eventlm simulate W.jsonl --replicaset big:cost_model=h200x4-llama3-70b \\
    --replicaset small:cost_model=h200-llama3-8b,replicas=2
  eventlm simulate W.jsonl --cost-model a100-llama3-8b --record sims
  eventlm replay sims/latest      (a simulated run is a trace like any other)

Requests longer than the context are rejected and counted. Latencies are of sequences that ran to their end."""
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("--cost-model", metavar="MODEL", help=f"{COST_MODEL_HELP}; a --replicaset may have its own")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--speed-up-arrivals", default="1", metavar="X", help="bring arrivals closer together, 2: twice the load"
    )
    text = "N clients send one request after the other, whatever the workload's times"
    add_number(load, "--closed-loop", text, least=0, default=0)
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo", default="", metavar="LIMITS", help="ttft=MS,tpot=MS,e2e=MS of requests that bring none"
    )
    results.add_argument("--record", metavar="DIR", help="write the run's trace to DIR/<run>/trace.jsonl")
    results.add_argument("--json", action="store_true", help="print one JSON object, times in nanoseconds")
    results.add_argument("--plot", metavar="DIR", help="write pictures (PNG) to this folder")
    add_engine_flags(parser)
    add_replicaset_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print the report."""
    speed_up_ppm = parse_speed_up(arguments.speed_up_arrivals, "--speed-up-arrivals")
    if arguments.closed_loop and speed_up_ppm != 1_000_000:
        raise UsageError("--closed-loop sends requests when others have ended: leave --speed-up-arrivals out")
    from eventlm.cli.output import count_progress, print_report
    from eventlm.cli.simulate.report import as_object, render
    from eventlm.config.objectives import parse_objectives
    from eventlm.metrics.trace_metrics import StatsCollector
    from eventlm.replay.simulate.simulation import simulate

    objectives = parse_objectives(arguments.slo) if arguments.slo else None
    (engine, cost, source), cost_models = load_ingredients(arguments)
    stats = StatsCollector() if arguments.plot is not None else None
    workload = source.sped_up(speed_up_ppm)
    with count_progress("simulating", "request", is_long=len(workload.requests) > 500) as on_progress:
        result = simulate(
            workload,
            engine.setup,
            cost,
            predictor=engine.predictor,
            others=engine.others,
            closed_loop=arguments.closed_loop,
            objectives=objectives,
            record=arguments.record,
            subscribers=[stats.see] if stats is not None else [],
            on_progress=on_progress,
        )
    load = [source.source]
    load += [f"x {arguments.speed_up_arrivals}"] if arguments.speed_up_arrivals != "1" else []
    load += [f"closed loop of {arguments.closed_loop}"] if arguments.closed_loop else []
    notes = engine.notes
    lines = render(result, workload=", ".join(load), cost_model=cost_models, slo=arguments.slo, notes=notes)
    print_report(lines, as_object(result, notes) if arguments.json else None)
    if stats is not None:
        from eventlm.cli.trace.plots import plot

        for picture in plot(stats.stats(path="", num_bytes=0, warnings=[]), arguments.plot, in_clock_time=False):
            print(picture, file=sys.stderr)
    return 0
