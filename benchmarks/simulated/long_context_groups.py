"""Long contexts on more and more KV groups: the time per token in the simulator.

python benchmarks/simulated/long_context_groups.py --output DIR

Llama-3-8B on simulated H200s, one in each group: nothing of this was measured on GPUs. A context lies in all groups,
each of which reads its share of it and all weights, and gets the others' outputs in every layer. What is shown is the
time from one token to the next of a sequence that has the engine to itself.
long_context_groups.png in this folder is one of these pictures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib.figure import Figure

from eventlm.config.load import load_config
from eventlm.events import Arrived
from eventlm.pictures import GREY, new_axes, save_pictures
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams

COST_MODEL = "h200-llama3-8b"
GROUPS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32_768, 131_072, 524_288, 1_048_576)
SHARD_TOKENS = 8192
NUM_OUTPUT_TOKENS = 32
COLOURS = ("#8c8c8c", "#55a868", "#2f6db3", "#c44e52")


def milliseconds_a_token(num_tokens: int, num_groups: int) -> float:
    """Of one sequence with a context of `num_tokens`."""
    scheduling = SchedulingParams(model="")
    arrival = Arrived(prompt_tokens=num_tokens, max_tokens=NUM_OUTPUT_TOKENS, scheduling=scheduling)
    request = WorkloadRequest(arrival=arrival, arrival_ns=0, outputs=[SequenceOutput()])
    workload, cost = Workload(source=f"a context of {num_tokens:,}", requests=[request]), load_cost_model(COST_MODEL)
    options = {
        "max_num_batched_tokens": SHARD_TOKENS,
        # In one group all of it: what is compared is time, not room.
        "num_blocks": (num_tokens + NUM_OUTPUT_TOKENS) // 16 + 2,
        "kv_parallel_size": num_groups,
        "kv_shard_tokens": SHARD_TOKENS,
    }
    engine = build_engine(load_config(None, options, environment={}), workload, cost)
    (sequence,) = simulate(workload, engine.setup, cost, predictor=engine.predictor).outcome.sequences
    assert sequence.tpot_ns is not None
    return sequence.tpot_ns / 1e6


def draw(figure: Figure, times: dict[int, dict[int, float]]) -> None:
    """Milliseconds against groups, both in logarithmic steps."""
    axes = new_axes(figure)
    for (num_tokens, of_context), colour in zip(times.items(), COLOURS, strict=False):
        axes.plot(list(of_context), list(of_context.values()), "o-", color=colour, label=f"{num_tokens:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    axes.minorticks_off()
    groups = list(next(iter(times.values())))
    axes.set_xticks(groups, [str(each) for each in groups])
    axes.set_xlabel("KV groups, of one GPU each", color=GREY)
    axes.set_ylabel("milliseconds to the next token (simulated)", color=GREY)
    axes.legend(frameon=False, title="context")


def main() -> int:
    """Simulate, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the picture")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="lengths in tokens")
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)), help="numbers of groups")
    arguments = parser.parse_args()
    contexts, groups = ([int(part) for part in text.split(",")] for text in (arguments.contexts, arguments.groups))
    print(f"simulated: {COST_MODEL}, shards of {SHARD_TOKENS:,} tokens; nothing of this was measured")
    print(f"{'context':>9}  " + "  ".join(f"{f'K = {each}':>8}" for each in groups))
    times: dict[int, dict[int, float]] = {}
    for num_tokens in contexts:
        times[num_tokens] = {each: milliseconds_a_token(num_tokens, each) for each in groups}
        print(f"{num_tokens:>9,}  " + "  ".join(f"{value:>5.1f} ms" for value in times[num_tokens].values()))
    title = f"simulated, not measured: {COST_MODEL}, one sequence alone"
    for path in save_pictures(arguments.output, title, [(Path(__file__).stem, lambda figure: draw(figure, times))]):
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
