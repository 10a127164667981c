"""What it costs to simulate many replicas under load: processor time, and microseconds for each event and step.

    eventlm trace import --from azure AzureLLMInferenceTrace_conv.csv -o azure.jsonl
    python benchmarks/simulated/fleet.py azure.jsonl [--replicas 1000] [--rate 5400] [--seconds 60]

The requests of the workload, one after the other and again from the first, arrive at even distances. The simulation
goes on until the last of them has ended. The time of a fraction of the replicas at the same fraction of the rate
(`--replicas 10 --rate 54`) shows what is due to the number of replicas alone.
"""

from __future__ import annotations

import argparse
import platform
import time

from msgspec import structs

from eventlm.config.load import load_config
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.file import read_workload
from eventlm.replay.workload.workload import Workload
from eventlm.types import NANOSECONDS_PER_SECOND

NUM_BLOCKS = 16_000
COST_MODEL = "a100-llama3-8b"


def repeated(workload: Workload, rate: int, seconds: float) -> Workload:
    """The workload's requests at `rate` a second, again and again, each a request of its own."""
    requests = [
        structs.replace(
            workload.requests[index % len(workload.requests)],
            arrival_ns=index * NANOSECONDS_PER_SECOND // rate,
            parent=-1,
            think_ns=None,
        )
        for index in range(round(rate * seconds))
    ]
    return structs.replace(workload, requests=requests)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="a workload file whose requests have no groups")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--rate", type=int, default=5400, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals")
    parser.add_argument("--router", default="least_loaded")
    arguments = parser.parse_args()
    workload = repeated(read_workload(arguments.workload), arguments.rate, arguments.seconds)
    options = {
        "replicas": arguments.replicas,
        "router": arguments.router,
        "num_blocks": NUM_BLOCKS,
        "max_queue_len": len(workload.requests),
    }
    cost = load_cost_model(COST_MODEL)
    began = time.process_time()
    engine = build_engine(load_config(None, options, environment={}), workload, cost)
    result = simulate(workload, engine.setup, cost, predictor=engine.predictor)
    taken = time.process_time() - began
    found = result.summary
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one process")
    size = found.output_tokens / found.num_steps
    print(f"{found.num_requests:,} requests, {found.output_tokens:,} output tokens, {result.num_events:,} events")
    print(f"{found.num_steps:,} steps of {size:.1f} tokens, replicas {found.busy_ppm / 1e4:.0f} % busy")
    print(f"{found.duration_ns / 1e9:.1f} s simulated in {taken:.1f} s of processor time")
    print(f"{taken / result.num_events * 1e6:.1f} us an event, {taken / found.num_steps * 1e6:.1f} us a step")


if __name__ == "__main__":
    main()
