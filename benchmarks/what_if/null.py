"""Whether a what-if repeats what it knows: runs of a real model under different loads, replayed as they were.

    python benchmarks/what_if/null.py [--model smollm2] [--runs 20] [--seconds 8] [--folder DIR]

Each run has one of three mixes of requests, a rate, a policy, and a cache that is tight or ample. It is recorded, and
then repeated twice: with its own durations, where every decision must come out as recorded, and with those of a cost
model fitted to it. Printed is what the second is off by at p50 and p99, and the model's held-out error. The model
follows the pace that the machine had in the run; what a repetition without that is off by stands at the end: it is the
part of the error bars that a quiet machine makes small. Rates are parts of what the machine serves of a mix when all of
it is there at once. Nothing else should run on the machine.

On two cores a run takes --seconds, twice that where more comes than is served, and about 7 s for the engine's start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.what_if.open_loop import MAX_MODEL_LEN, MIXES, capacity, draw_workload, run_workload
from eventlm.replay.cost.fit import FitReport
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import WhatIfResult, what_if

POLICIES = ("fcfs", "edf", "lrs")
#: Of the rate at which a mix is served when all of it is there.
LOADS = (0.5, 0.8, 1.1)
#: Blocks of 16 tokens: room for one long request and little more, and for all that comes.
BLOCKS = {"tight": 44, "ample": 1024}
#: Long prompts take several steps.
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 64, "max_model_len": MAX_MODEL_LEN}
METRICS = ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99")
#: The null test's target for the median of each metric's errors.
TARGET = 0.05


class Setting(NamedTuple):
    """One run."""

    mix: str
    load: float
    policy: str
    blocks: str


def settings(num_runs: int) -> list[Setting]:
    """So many, in which every value of everything comes up alike."""
    every = [Setting(*chosen) for chosen in product(MIXES, LOADS, POLICIES, BLOCKS)]
    # 54 of them, and 29 has no factor in common with that: neighbours differ in everything, and all come up in turn.
    return [every[index * 29 % len(every)] for index in range(num_runs)]


class Errors(NamedTuple):
    """Of a baseline, relative to the record, and of the one that does not follow the machine's pace."""

    baseline: float
    unpaced: float


def errors_of(result: WhatIfResult, name: str) -> Errors:
    """Of a metric."""
    metric = next(metric for metric in result.comparison.metrics if metric.name == name)
    recorded, baseline, unpaced = metric.recorded, metric.baseline, metric.baseline_unpaced
    if recorded is None or baseline is None or unpaced is None:
        raise SystemExit(f"the run {result.path} has no {name}: make it longer with --seconds")
    return Errors(abs(baseline - recorded) / recorded, abs(unpaced - recorded) / recorded)


def measure(setting: Setting, index: int, rate: float, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Record a run, repeat it, and say what that is off by."""
    workload = draw_workload(MIXES[setting.mix], rate=rate, seconds=arguments.seconds, seed=index)
    run = run_workload(
        workload,
        folder,
        seed=index,
        model=arguments.model,
        policy=setting.policy,
        num_blocks=BLOCKS[setting.blocks],
        # Measured at each start, which also makes a worker's first steps no slower than others.
        predictor_cache=False,
        **ENGINE,
    )
    result = what_if(run.folder, [Alternative(changes=Changes(policy={"type": setting.policy}))])
    assert result.null is not None
    fit = result.sets[0].fit
    assert isinstance(fit, FitReport)
    errors = {name: errors_of(result, name) for name in METRICS}
    return setting._asdict() | {
        "requests": len(workload.requests),
        "steps": result.recorded.num_steps,
        "preemptions": result.recorded.num_preemptions,
        "decisions": result.null.num_decisions,
        "errors": {name: error.baseline for name, error in errors.items()},
        "errors_unpaced": {name: error.unpaced for name, error in errors.items()},
        "held_out": fit.mean,
        "held_out_near": fit.mean_near,
        "recorded_ms": {
            metric.name: metric.recorded / 1e6
            for metric in result.comparison.metrics
            if metric.name in METRICS and metric.recorded is not None
        },
    }


def main() -> None:
    """Measure, print a line for each run, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as `eventlm serve --model` takes it")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8, help="how long requests arrive in each run")
    parser.add_argument("--folder", help="keep the traces there")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        engine = ENGINE | {"model": arguments.model, "num_blocks": BLOCKS["ample"]}
        rates = {name: capacity(mix, folder, **engine).rate for name, mix in MIXES.items()}
        print("served at once: " + ", ".join(f"{mix} {rate:.2f}/s" for mix, rate in rates.items()), flush=True)
        print(
            "run  mix     load  policy  blocks  requests  steps  preempted  decisions  TTFT p50     p99  e2e p50"
            "     p99  held-out    near"
        )
        found = []
        for index, setting in enumerate(settings(arguments.runs)):
            row = measure(setting, index, rates[setting.mix] * setting.load, folder, arguments)
            found.append(row)
            print(line(index, row), flush=True)
    report(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


def line(index: int, row: dict[str, Any]) -> str:
    """A run as a line of the table. A null test that fails raises before it comes so far."""
    widths = zip(METRICS, (10, 8, 9, 8), strict=True)
    errors = "".join(f"{row['errors'][name]:>{width}.1%}" for name, width in widths)
    return (
        f"{index:>3}  {row['mix']:<7} {row['load']:>4}  {row['policy']:<6}  {row['blocks']:<6}  "
        f"{row['requests']:>8}  {row['steps']:>5}  {row['preemptions']:>9}  {row['decisions']:>9}{errors}  "
        f"{row['held_out']:>8.1%}  {row['held_out_near']:>6.1%}"
    )


def report(found: list[dict[str, Any]]) -> None:
    """Medians of all runs against the target."""
    num_decisions = sum(row["decisions"] for row in found)
    print(f"null test: {len(found)} of {len(found)} runs, {num_decisions:,} decisions, 0 divergences")
    for name in METRICS:
        middle = statistics.median(row["errors"][name] for row in found)
        print(f"{name}: median error {middle:.1%}, {'within' if middle < TARGET else 'above'} {TARGET:.0%}")
    everything = [value for row in found for value in row["errors"].values()]
    print(f"all four: median error {statistics.median(everything):.1%}, worst {max(everything):.1%}")
    unpaced = [value for row in found for value in row["errors_unpaced"].values()]
    print(f"without the machine's pace: median error {statistics.median(unpaced):.1%}, worst {max(unpaced):.1%}")
    print(f"cost model: median held-out error {statistics.median(row['held_out'] for row in found):.1%} a step")


if __name__ == "__main__":
    main()
