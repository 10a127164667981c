"""How fast simulations run, and what of that is the core, the simulator around it, the metrics and the trace.

python benchmarks/simulated/simulation.py                       steps/s at batches of 32
python benchmarks/simulated/simulation.py --azure W.jsonl       and a workload that is read from a file, such as
python benchmarks/simulated/simulation.py --mooncake W.jsonl    `eventlm trace import` makes of the public traces

Times are CPU seconds of one process, the best of several runs. The core alone is what it takes to apply the facts of
the same run again; each other part is what the run takes longer with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.config.load import load_config
from eventlm.config.objectives import Objectives
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.engine.setup import EngineSetup, make_setup
from eventlm.events import Arrived, Event, Fact, Header, Launched, Marker, WorkerUp
from eventlm.replay.cost.backend_model import BackendsCost
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.cost.model import CostModel, LinearCost
from eventlm.replay.outcome import OutcomeCollector
from eventlm.replay.simulate.engine import SimulatedSet, build_engine
from eventlm.replay.simulate.simulation import simulate, simulated_header
from eventlm.replay.simulate.simulator import Simulator, Subscriber
from eventlm.replay.simulate.summary import SimulationSummary
from eventlm.replay.simulate.timing import ModelledTiming, SetTiming
from eventlm.replay.simulate.trace import CHECKPOINT_EVENTS, SimulatedTrace
from eventlm.replay.workload.file import read_workload
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams

BATCH = 32
TARGET_STEPS_PER_SECOND = 10_000
TARGET_AZURE_SECONDS = 15
COST = LinearCost(base_ps=8_000_000_000, prefill_ps=30_000_000, decode_ps=30_000_000, context_ps=50_000)
PREDICTOR = [COST.base_ps, COST.prefill_ps, COST.decode_ps, COST.context_ps, COST.chunk_context_ps]


class Case(NamedTuple):
    """A workload for batches of 32."""

    name: str
    workload: Workload


class Timed(NamedTuple):
    """CPU seconds, and how many steps they were for."""

    seconds: float
    num_steps: int


def make_workload(num_requests: int, prompt_tokens: int, output_tokens: int) -> Workload:
    """Requests that are all there at once. Their lengths differ a little, so that they do not end together."""
    arrival = Arrived(prompt_tokens=prompt_tokens, max_tokens=output_tokens, scheduling=SchedulingParams(model=""))
    requests = [
        WorkloadRequest(
            arrival=Arrived(
                prompt_tokens=arrival.prompt_tokens,
                max_tokens=output_tokens - index % BATCH * 4,
                scheduling=SchedulingParams(model=""),
            ),
            arrival_ns=0,
            outputs=[SequenceOutput()],
        )
        for index in range(num_requests)
    ]
    return Workload(source="made", requests=requests)


def cases(num_steps: int) -> list[Case]:
    """One load without a queue, and one whose queued requests are admitted as others end."""
    return [
        Case("32 long decodes, no queue", make_workload(BATCH, 256, num_steps)),
        Case("32 decodes, 1,000 wait", make_workload(BATCH + 1000, 128, 256)),
    ]


def engine(workload: Workload) -> EngineSetup:
    """One that runs 32 sequences at once."""
    config = load_config(None, {"max_num_seqs": BATCH, "max_queue_len": 100_000}, environment={})
    longest = max(request.arrival.prompt_tokens + request.arrival.max_tokens for request in workload.requests)
    num_blocks = BATCH * (longest // 16 + 2)
    return make_setup(config, model="made", model_name="made", num_blocks=num_blocks, max_model_len=longest)


def run(workload: Workload, setup: EngineSetup, subscribers: Sequence[Subscriber], *, checkpoints: bool) -> Timed:
    """The simulator with these subscribers."""
    header = simulated_header(workload, [SimulatedSet(setup, PREDICTOR, COST)])
    num_steps = 0

    def count(event: Event) -> None:
        nonlocal num_steps
        num_steps += type(event) is Launched

    core = Core(setup.core, setup.plugins, Predictor.from_coefficients(PREDICTOR))
    timing = ModelledTiming([SetTiming(COST, setup.core)])
    began = time.process_time()
    simulator = Simulator(
        header,
        core,
        workload,
        timing,
        external_facts=[WorkerUp(replica=0, epoch=1)],
        checkpoint_events=CHECKPOINT_EVENTS if checkpoints else 0,
        subscribers=[count, *subscribers],
    )
    simulator.run()
    return Timed(time.process_time() - began, num_steps)


def run_core(setup: EngineSetup, header: Header, facts: Sequence[Fact | Marker], num_steps: int) -> Timed:
    """The core alone, on the facts of a run."""
    core = Core(setup.core, setup.plugins, Predictor.from_coefficients(header.predictor))
    began = time.process_time()
    for fact in facts:
        core.apply(fact)
    return Timed(time.process_time() - began, num_steps)


def best(measure: Callable[[], Timed], repetitions: int) -> Timed:
    """The fastest of several runs."""
    return min((measure() for _ in range(repetitions)), key=lambda found: found.seconds)


def measure_case(case: Case, repetitions: int, folder: Path) -> bool:
    """Print what a case takes, and each part's share; whether it meets the target."""
    workload, setup = case.workload, engine(case.workload)
    facts: list[Any] = []
    run(
        workload,
        setup,
        [lambda event: facts.append(event) if isinstance(event, Fact | Marker) else None],
        checkpoints=False,
    )
    runs = 0

    def with_trace() -> Timed:
        nonlocal runs
        runs += 1
        with SimulatedTrace(folder, f"{len(workload.requests)}-{runs}") as trace:
            return run(workload, setup, [OutcomeCollector().see, trace.see], checkpoints=True)

    bare = best(lambda: run(workload, setup, [], checkpoints=False), repetitions)
    metrics = best(lambda: run(workload, setup, [OutcomeCollector().see], checkpoints=False), repetitions)
    fluid = best(
        lambda: run(workload, setup, [OutcomeCollector(Objectives(ttft=500, tpot=50)).see], checkpoints=False),
        repetitions,
    )
    written = best(with_trace, repetitions)
    core = best(lambda: run_core(setup, facts[0], facts, bare.num_steps), repetitions)
    print(f"{case.name}: {metrics.num_steps:,} steps, {metrics.num_steps / metrics.seconds:,.0f} steps/s")
    parts = [
        ("core", core.seconds, core.seconds),
        ("simulator", bare.seconds - core.seconds, bare.seconds),
        ("metrics", metrics.seconds - bare.seconds, metrics.seconds),
        ("fluidity (with --slo)", fluid.seconds - metrics.seconds, fluid.seconds),
        ("trace (with --record)", written.seconds - metrics.seconds, written.seconds),
    ]
    for name, seconds, until_here in parts:
        per_step = seconds / metrics.num_steps * 1e6
        print(f"  {name:<22}{per_step:8.1f} us a step{seconds / metrics.seconds:8.0%}    up to here "
              f"{metrics.num_steps / until_here:10,.0f} steps/s")  # fmt: skip
    return metrics.num_steps / metrics.seconds >= TARGET_STEPS_PER_SECOND


def measure_file(path: str, cost: CostModel, arguments: argparse.Namespace) -> SimulationSummary:
    """Print what a workload's simulation takes, reading the file apart."""
    began = time.process_time()
    workload = read_workload(path)
    read = time.process_time()
    options = {"policy": arguments.policy, "batcher": arguments.batcher, "replicas": arguments.replicas}
    built = build_engine(load_config(None, options | {"max_queue_len": 100_000}, environment={}), workload, cost)
    ready = time.process_time()
    result = simulate(workload, built.setup, cost, predictor=built.predictor)
    seconds, s = time.process_time() - ready, result.summary
    print(f"{path}: {len(workload.requests):,} requests, {s.duration_ns / 1e9:,.0f} s, {arguments.cost_model}, "
          f"{arguments.replicas} x {arguments.policy} {arguments.batcher}")  # fmt: skip
    print(f"  read in {read - began:.2f} s, simulated in {seconds:.2f} s: {s.num_steps:,} steps, "
          f"{s.num_steps / seconds:,.0f} steps/s, {s.output_tokens / s.num_steps:.1f} tokens a step, "
          f"busy {s.busy_ppm / 1e4:.0f} %, {s.num_preemptions:,} preemptions")  # fmt: skip
    hits = "-" if s.hit_ppm is None else f"{s.hit_ppm / 1e4:.1f} %"
    ttft = s.latencies["ttft"]
    print(f"  {s.num_complete:,} complete, {s.num_rejected:,} rejected, cache hits {hits}, TTFT p50 "
          f"{ttft.p50 / 1e6:,.0f} ms, p99 {ttft.p99 / 1e6:,.0f} ms")  # fmt: skip
    return s


def main() -> int:
    """Run the benchmark; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", metavar="FILE", help=f"the Azure hour; target {TARGET_AZURE_SECONDS} s")
    parser.add_argument("--mooncake", metavar="FILE", help="the Mooncake hour")
    parser.add_argument("--cost-model", default="a100-llama3-8b", metavar="MODEL", help="for the files")
    parser.add_argument("--policy", default="fcfs", metavar="SPEC")
    parser.add_argument("--batcher", default="fixed", metavar="SPEC")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--steps", type=int, default=4000, metavar="N", help="of the long decodes (default: 4000)")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--no-batches", action="store_true", help="only the files")
    arguments = parser.parse_args()
    missed = []
    if not arguments.no_batches:
        with tempfile.TemporaryDirectory() as folder:
            for case in cases(arguments.steps):
                if not measure_case(case, arguments.repetitions, Path(folder)):
                    missed.append(f"{case.name}: fewer than {TARGET_STEPS_PER_SECOND:,} steps/s")
    cost = load_cost_model(arguments.cost_model)
    assert not isinstance(cost, BackendsCost)
    if arguments.azure:
        began = time.process_time()
        measure_file(arguments.azure, cost, arguments)
        seconds = time.process_time() - began
        if seconds > TARGET_AZURE_SECONDS:
            missed.append(f"the Azure hour took {seconds:.1f} s, more than {TARGET_AZURE_SECONDS} s")
    if arguments.mooncake:
        measure_file(arguments.mooncake, cost, arguments)
    for miss in missed:
        print(f"target missed: {miss}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
