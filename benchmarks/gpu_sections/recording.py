"""What recording costs: two engines, one of which records, given the same work in turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start, warm_up
from benchmarks.gpu_harness.row import Context, Parts, Row, cost

MOST_COST = 0.01
NUM_ROUNDS = 5
#: Of the GPU's memory, for each of the two.
SHARE = 0.4


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"recording": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    model = qwen(context, "0.6B")
    rounds = 1 if context.smoke else NUM_ROUNDS
    options = {"gpu_memory_utilization": SHARE}
    recorded: list[float] = []
    unrecorded: list[float] = []
    with (
        start(context, model, record=Path(context.folder) / "runs", **options) as recording,
        start(context, model, **options) as silent,
    ):
        for number in range(rounds + 1):
            # Another seed each round, or all prompts would be in the prefix cache.
            workload = even_workload(context, num_seqs=256, prompt_len=64, output_len=192, seed=number)
            if not number:
                warm_up(recording, workload)
                warm_up(silent, workload)
            pair = [(recorded, recording), (unrecorded, silent)]
            for times, llm in pair if number % 2 else reversed(pair):
                times.append(generate(llm, workload).seconds)
    # The first round has what happens but once.
    ratios = [with_it / without for with_it, without in zip(recorded[1:], unrecorded[1:], strict=True)]
    note = f"median of {rounds} pairs, {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    yield cost("recording, of the run's time", statistics.median(ratios) - 1, "", at_most=MOST_COST, note=note)
