"""`eventlm sweep`: many simulations, and the load that each configuration can take."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import TYPE_CHECKING

from eventlm.cli.config_flags import given_options
from eventlm.cli.parser import Parser, add_number, exit_code_lines
from eventlm.cli.simulate.flags import (
    COST_MODEL_HELP,
    WORKLOAD_HELP,
    SimulatedConfig,
    add_engine_flags,
    add_replicaset_flag,
    engine_options,
    parse_speed_up,
    read_simulated_config,
    read_workload,
)
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.errors import ExitCode, UsageError
from eventlm.system.processors import usable_cores

if TYPE_CHECKING:
    from eventlm.replay.sweep.sweep import SweepPlan

DEFAULT_LOADS = "0.5,1,1.5,2"
#: Options that may be given several times.
_REPEATED = (
    "policy", "batcher", "router", "replicas", "tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size",
)  # fmt: skip


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = """\
Simulate a workload under every combination of policies, batchers, routers, numbers of replicas, ranks and loads, in
parallel processes, and show how much load each configuration can take within an SLO: its capacity, the
highest load that keeps the limits with all lower ones keeping them too. A load of 2 brings the workload's
arrivals twice as close together. A load at which requests are turned away for a full queue keeps no limit.

Results lie in DIR, one file for each simulation: a sweep that was interrupted, or gets more loads, goes on
with what is missing. DIR/sweep.csv, sweep.json and sweep.png have all that the last sweep asked for."""
    parser.usage = "eventlm sweep WORKLOAD --cost-model MODEL --output DIR [flags]"
    parser.epilog = """\
examples:
  eventlm sweep W.jsonl --cost-model h200-llama3-8b --output sweep \\
    --policy fcfs --policy lrs --batcher fixed --batcher dynamic \\
    --loads 0.5,1,1.5,2 --slo p99_ttft=2000 --refine 3
  eventlm sweep runs/latest --cost-model runs/latest --output sweep \\
    --replicas 1 --replicas 2 --slo p99_ttft=500,p90_tpot=50
  eventlm sweep W.jsonl --cost-model h200-llama3-8b --output sweep \\
    --tensor-parallel-size 1 --tensor-parallel-size 2 --slo p99_ttft=2000

""" + exit_code_lines(
        ExitCode.OK,
        ExitCode.USAGE,
        ExitCode.INTERRUPTED,
        meanings={ExitCode.FAILED: "a simulation failed (the others are in the table)"},
    )
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("--cost-model", metavar="MODEL", help=f"{COST_MODEL_HELP}; a --replicaset may have its own")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    grid = parser.add_argument_group("what to combine (each may be given several times)")
    grid.add_argument("--policy", action="append", metavar="SPEC", help="which sequence goes first (default: fcfs)")
    grid.add_argument("--batcher", action="append", metavar="SPEC", help="how large prefill chunks are")
    grid.add_argument("--router", action="append", metavar="SPEC", help="which replica gets a request")
    add_number(grid, "--replicas", "worker replicas", action="append")
    add_number(grid, "--tensor-parallel-size", "ranks that share each layer of a replica", action="append")
    add_number(grid, "--pipeline-parallel-size", "stages of a replica, which share its layers", action="append")
    add_number(grid, "--kv-parallel-size", "groups of ranks that share the KV cache of a replica", action="append")
    grid.add_argument(
        "--loads", default=DEFAULT_LOADS, metavar="X,...",
        help=f"factors on the workload's arrival rate (default: {DEFAULT_LOADS})",
    )  # fmt: skip
    capacity = parser.add_argument_group("capacity")
    capacity.add_argument(
        "--slo", default="", metavar="LIMITS",
        help="p99_ttft=MS,p50_tpot=MS,...: p50, p90, p95, p99 or max of ttft, tpot or e2e",
    )  # fmt: skip
    text = "N more loads for each configuration, to halve what lies between the last that keeps the SLO and the first "
    add_number(capacity, "--refine", text + "that does not", default=0)
    add_number(parser, "--jobs", "simulations at once (default: one for each core)")
    parser.add_argument("--json", action="store_true", help="print what is in DIR/sweep.json")
    add_engine_flags(parser, without=_REPEATED)
    add_replicaset_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the simulations that are missing and print the table."""
    loads_ppm = _loads(arguments.loads)
    from eventlm.cli.output import count_progress, print_report, warn
    from eventlm.cli.sweep.report import as_object, render, write_files
    from eventlm.replay.sweep.sweep import Sweep

    loaded = read_workload(arguments.workload)
    plan = _plan(arguments, read_simulated_config(arguments, loaded), loads_ppm)
    jobs = usable_cores() if arguments.jobs is None else arguments.jobs
    sweep = Sweep(plan, loaded, arguments.output, num_jobs=jobs)
    with count_progress("sweeping", "simulation") as on_progress:
        result = sweep.run(on_progress=on_progress)
    files = write_files(result, arguments.output)
    print_report(render(result), as_object(result) if arguments.json else None)
    for note in loaded.notes:
        print(f"eventlm: note: {note}", file=sys.stderr)
    for path in files:
        print(f"eventlm: wrote {path}", file=sys.stderr)
    failures = [
        f"{each.name}, load {load_ppm / 1e6:g} failed: {error}"
        for each in result.configurations
        for load_ppm, error in each.errors.items()
    ]
    warn(failures)
    return ExitCode.FAILED if failures else ExitCode.OK


def _plan(arguments: argparse.Namespace, simulated: SimulatedConfig, loads_ppm: list[int]) -> SweepPlan:
    from eventlm.cli.trace_path import trace_file
    from eventlm.core.shards import Layout
    from eventlm.replay.sweep.slo import parse_limits
    from eventlm.replay.sweep.sweep import SweepPlan, make_configurations

    config, _, costs = simulated
    scheduler = config.scheduler
    options = engine_options(config, given_options(arguments), without=_REPEATED)
    if config.replicasets:
        options |= {"model": config.model.model, "replicasets": config.replicasets}
    policies, batchers, routers = (
        [parse_plugin_spec(text) for text in getattr(arguments, kind) or ()] or [getattr(scheduler, kind)]
        for kind in ("policy", "batcher", "router")
    )
    parallel = config.parallel
    layouts = product(
        arguments.tensor_parallel_size or [parallel.tensor_parallel_size],
        arguments.pipeline_parallel_size or [parallel.pipeline_parallel_size],
        arguments.kv_parallel_size or [parallel.kv_parallel_size],
    )
    return SweepPlan(
        workload_path=trace_file(arguments.workload),
        costs=costs,
        configurations=make_configurations(
            policies,
            batchers,
            routers,
            arguments.replicas or [scheduler.replicas],
            [Layout(*sizes) for sizes in layouts],
        ),
        loads_ppm=loads_ppm,
        limits=parse_limits(arguments.slo) if arguments.slo else [],
        options=options,
        num_refinements=arguments.refine,
    )


def _loads(text: str) -> list[int]:
    loads = [parse_speed_up(part.strip(), "--loads") for part in text.split(",") if part.strip()]
    if not loads:
        raise UsageError("--loads: at least one is needed, such as 0.5,1,2")
    return loads
