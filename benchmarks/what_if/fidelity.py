"""Whether a what-if foretells what really comes: record under fcfs, predict other policies, then run them.

    python benchmarks/what_if/fidelity.py [--model smollm2] [--seconds 30] [--load 0.95] [--rounds 3] [--folder DIR]
    python benchmarks/what_if/fidelity.py --mix rejections --mix impatient --mix closed-loop [--rounds 3] [--seed 1]

With --mix it takes work whose record does not show everything, on the fake model (`mixes.py`). Nine in ten
true values must lie within the error bars, and no change that is called one may have gone the other way. That takes
about 20 s for each of the 1 + 2 x rounds runs of a mix.

Without --mix, one workload, long prompts among short ones, goes to an engine under fcfs and is recorded. From that
record alone edf and lrs are predicted. Then fcfs, edf and lrs serve the same arrivals with the same prompts and seeds,
in turn, for some rounds. It prints the prediction against the median of the reruns, and the reruns' own spread, because
what a machine cannot repeat cannot be predicted. Where policies really differ, by more than 10 % and in all reruns, the
prediction must name the better one. Nothing else should run on the machine.

On two cores each of the 1 + 3 x rounds runs takes --seconds and about 8 s more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.what_if.mixes import MIXES as MIXES_OF_FAKE
from benchmarks.what_if.mixes import Figure, report
from benchmarks.what_if.mixes import measure as measure_mix
from benchmarks.what_if.open_loop import MAX_MODEL_LEN, MIXES, capacity, draw_workload, run_workload
from eventlm.bus.log_reader import LogReader
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.report import render
from eventlm.replay.what_if.what_if import what_if

RECORDED = "fcfs"
PREDICTED = ("edf", "lrs")
METRICS = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
#: A long prompt takes several steps, so that it matters who goes first.
ENGINE: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
    "num_blocks": 1024,
    "max_model_len": MAX_MODEL_LEN,
}
#: The targets: of the error, unless the reruns themselves differ by more, and of what counts as a real difference.
TARGET = 0.07
DIFFERENCE = 0.10


class Row(NamedTuple):
    """A metric of a policy, in ms."""

    policy: str
    metric: str
    predicted: float
    reruns: list[float]

    @property
    def measured(self) -> float:
        """The median of the reruns."""
        return statistics.median(self.reruns)

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1

    @property
    def spread(self) -> float:
        """Of the reruns."""
        return (max(self.reruns) - min(self.reruns)) / self.measured

    @property
    def is_within(self) -> bool:
        """Whether the prediction is as good as it has to be."""
        return abs(self.error) <= max(TARGET, self.spread)


def outcome_of(folder: Path) -> RunOutcome:
    """What a recorded run came to."""
    collector = OutcomeCollector()
    with LogReader(folder / "trace.jsonl") as log:
        for line in log:
            collector.see(line.event())
    return collector.outcome()


def value_ms(outcome: RunOutcome, latency: str, quantile: str) -> float:
    """A quantile of a latency."""
    found = outcome.latency(latency)
    if found is None:
        raise SystemExit(f"no request has a {latency}: make the runs longer with --seconds")
    return float(getattr(found, quantile)) / 1e6


def measure(arguments: argparse.Namespace, folder: str) -> list[Row]:
    """Record, predict, and run."""
    engine = ENGINE | {"model": arguments.model}
    measured = capacity(MIXES["mixed"], folder, **engine)
    engine["predictor"] = measured.predictor
    rate = arguments.load * measured.rate
    workload = draw_workload(MIXES["mixed"], rate=rate, seconds=arguments.seconds, seed=arguments.seed)
    print(f"{len(workload.requests)} requests, {rate:.2f} a second, load {arguments.load}", flush=True)

    def serve(policy: str) -> Path:
        return run_workload(workload, folder, seed=arguments.seed, warm_up=True, policy=policy, **engine).folder

    recorded = serve(RECORDED)
    result = what_if(recorded, [Alternative(changes=Changes(policy={"type": policy})) for policy in PREDICTED])
    predicted = {RECORDED: result.baseline.outcome} | {each.name: each.outcome for each in result.alternatives}
    reruns: dict[str, list[RunOutcome]] = {policy: [] for policy in predicted}
    for index in range(arguments.rounds):
        for policy, found in reruns.items():
            found.append(outcome_of(serve(policy)))
        print(f"round {index + 1} of {arguments.rounds} done", flush=True)
    return [
        Row(
            policy,
            f"{latency} {quantile}",
            value_ms(outcome, latency, quantile),
            [value_ms(rerun, latency, quantile) for rerun in reruns[policy]],
        )
        for policy, outcome in predicted.items()
        for latency, quantile in METRICS
    ]


def is_real(one: Row, other: Row) -> bool:
    """Whether two policies differ by enough, and in every pair of their reruns the same one is better."""
    is_enough = abs(one.measured - other.measured) > DIFFERENCE * min(one.measured, other.measured)
    return is_enough and (max(one.reruns) < min(other.reruns) or max(other.reruns) < min(one.reruns))


def winners(rows: list[Row]) -> tuple[int, int, list[str]]:
    """How many pairs of policies really differ, how many of those are foretold right, and those that are not."""
    num_pairs = num_right = 0
    wrong = []
    for latency, quantile in METRICS:
        of_metric = [row for row in rows if row.metric == f"{latency} {quantile}"]
        for one, other in combinations(of_metric, 2):
            if not is_real(one, other):
                continue
            num_pairs += 1
            if (one.measured < other.measured) == (one.predicted < other.predicted):
                num_right += 1
            else:
                wrong.append(f"{one.metric}: {one.policy} against {other.policy}")
    return num_pairs, num_right, wrong


def measure_mixes(arguments: argparse.Namespace) -> int:
    """The mixes that were asked for; 1 if a target is missed."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        for name in arguments.mix:
            result, found = measure_mix(name, folder, seed=arguments.seed, rounds=arguments.rounds)
            print(render(result), flush=True)
            figures += found
    is_met = report(figures)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([figure._asdict() for figure in figures], indent=1))
    return int(not is_met)


def main() -> int:
    """Measure, and print predicted against measured; 1 if a target of a mix is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", action="append", choices=sorted(MIXES_OF_FAKE), help="may be repeated")
    parser.add_argument("--model", default="smollm2", help="as `eventlm serve --model` takes it")
    parser.add_argument("--seconds", type=float, default=30, help="how long requests arrive in each run")
    parser.add_argument("--load", type=float, default=0.95, help="of what is served when all is there at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="keep the traces there")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    if arguments.mix:
        return measure_mixes(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(arguments, arguments.folder or temporary)
    print("policy  metric    predicted, ms  measured, ms   error  reruns' spread  within max(7 %, spread)")
    for row in rows:
        print(
            f"{row.policy:<6}  {row.metric:<8}  {row.predicted:>13,.1f}  {row.measured:>12,.1f}  {row.error:>+6.1%}  "
            f"{row.spread:>14.1%}  {'yes' if row.is_within else 'no'}"
        )
    foretold = [row for row in rows if row.policy != RECORDED]
    print(
        f"within: {sum(row.is_within for row in foretold)} of {len(foretold)} predictions of {' and '.join(PREDICTED)}"
    )
    num_pairs, num_right, wrong = winners(rows)
    print(f"winner: {num_right} of {num_pairs} differences above {DIFFERENCE:.0%} in all reruns are foretold right")
    for each in wrong:
        print(f"  not {each}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
