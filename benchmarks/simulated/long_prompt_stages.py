"""A prompt of a million tokens on more and more stages: its time to first token in the simulator.

python benchmarks/simulated/long_prompt_stages.py --output DIR

Llama-3-70B on simulated H200s, four in each stage: nothing of this was measured on GPUs. Chunks of the prompt follow
each other through the stages. Beside chunks of the same length and chunks that take equally long stands what n equal
chunks over S stages take, (n + S - 1) / n of an S-th of one stage's time. long_prompt_stages.png in this folder is one
of these pictures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from eventlm.config.load import load_config
from eventlm.events import Arrived
from eventlm.pictures import GREY, new_axes, save_pictures
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams

COST_MODEL = "h200x4-llama3-70b"
STAGES = (1, 2, 4, 8, 12, 15)
NUM_TOKENS = 1_000_000
CHUNK_TOKENS = 4096
TARGET_MS = 400
BATCHERS = {"chunks of 4,096 tokens": "fixed", "chunks of equal time": "dynamic"}
COLOURS = {"fixed": "#c44e52", "dynamic": "#2f6db3"}


class Point(NamedTuple):
    """Of one simulation: the time to first token, and in how many chunks the prompt was computed."""

    ttft_s: float
    num_chunks: int


def prompt_alone(num_tokens: int) -> Workload:
    """One prompt that finds the engine idle."""
    arrival = Arrived(prompt_tokens=num_tokens, max_tokens=1, scheduling=SchedulingParams(model=""))
    request = WorkloadRequest(arrival=arrival, arrival_ns=0, outputs=[SequenceOutput()])
    return Workload(source=f"a prompt of {num_tokens:,} tokens", requests=[request])


def simulated(batcher: str, num_stages: int, num_tokens: int) -> Point:
    """The prompt on so many stages. Equal chunks of time are shorter, the more stages there are, so that there are as
    many chunks for each stage to work on.
    """
    spec = f"dynamic:target_ms={TARGET_MS / num_stages:g}" if batcher == "dynamic" else batcher
    budget = CHUNK_TOKENS if batcher == "fixed" else 4 * CHUNK_TOKENS
    workload, cost = prompt_alone(num_tokens), load_cost_model(COST_MODEL)
    options = {
        "batcher": spec,
        "max_num_batched_tokens": budget,
        "num_blocks": num_tokens // 16 + 2,
        "pipeline_parallel_size": num_stages,
    }
    engine = build_engine(load_config(None, options, environment={}), workload, cost)
    result = simulate(workload, engine.setup, cost, predictor=engine.predictor)
    (sequence,) = result.outcome.sequences
    assert sequence.ttft_ns is not None
    return Point(sequence.ttft_ns / 1e9, result.summary.num_steps)


def draw(figure: Figure, points: dict[str, dict[int, Point]], num_tokens: int) -> None:
    """Seconds against stages, both in logarithmic steps."""
    axes = new_axes(figure)
    for batcher, name in ((batcher, name) for name, batcher in BATCHERS.items()):
        of_batcher = points[batcher]
        seconds = [point.ttft_s for point in of_batcher.values()]
        axes.plot(list(of_batcher), seconds, "o-", color=COLOURS[batcher], label=name)
        alone = of_batcher[min(of_batcher)]
        bound = [
            alone.ttft_s * (point.num_chunks + stages - 1) / (point.num_chunks * stages)
            for stages, point in of_batcher.items()
        ]
        axes.plot(list(of_batcher), bound, ":", color=COLOURS[batcher], label="if chunks and stages were equal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"])
    axes.minorticks_off()
    axes.set_xticks(list(points["fixed"]), [str(stages) for stages in points["fixed"]])
    axes.set_xlabel("stages, of four GPUs each", color=GREY)
    axes.set_ylabel(f"seconds to the first token of {num_tokens:,} (simulated)", color=GREY)
    axes.legend(frameon=False)


def main() -> int:
    """Simulate, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the picture")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="length of the prompt")
    parser.add_argument("--stages", default=",".join(map(str, STAGES)), help="numbers of stages")
    arguments = parser.parse_args()
    stages = [int(part) for part in arguments.stages.split(",")]
    print(f"simulated: {COST_MODEL}, {arguments.tokens:,} tokens; nothing of this was measured")
    print(f"{'stages':>6}  {'batcher':8}  {'chunks':>6}  {'TTFT':>8}  {'speed-up':>8}")
    points: dict[str, dict[int, Point]] = {}
    for batcher in BATCHERS.values():
        points[batcher] = {}
        for num_stages in stages:
            point = points[batcher][num_stages] = simulated(batcher, num_stages, arguments.tokens)
            speed_up = points[batcher][stages[0]].ttft_s / point.ttft_s
            print(f"{num_stages:>6}  {batcher:8}  {point.num_chunks:>6,}  {point.ttft_s:>6.1f} s  {speed_up:>8.2f}")
    title = f"simulated, not measured: {COST_MODEL}, a prompt of {arguments.tokens:,} tokens alone"
    pictures = [(Path(__file__).stem, lambda figure: draw(figure, points, arguments.tokens))]
    for path in save_pictures(arguments.output, title, pictures):
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
