"""Decodes in a pipeline of stages with one thread each: beside the rate of its slowest stage, and beside one worker.

    python -m benchmarks.cpu.stages [--model smollm2] [--clients 8] [--stages 2] [--tokens 256] [--rounds 5]

The rate of the slowest stage is the bound: the tokens of all steps over the time in which that stage computed, as
recorded. The one worker has as many threads as there are stages. Both engines take turns; what counts is the median of
the rounds, and of their ratios. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from eventlm import LLM, SamplingParams
from eventlm.bus.log_reader import LogReader
from eventlm.events import Launched, StepCompleted
from eventlm.table import table

PROMPT_TOKENS = 64


class Rates(NamedTuple):
    """Tokens a second of decodes. bound: what the stage that computed longest could have done alone."""

    measured: float
    bound: float


def read_rates(trace: Path, first_step: int) -> tuple[Rates, int]:
    """Of the steps from `first_step` on that only decode, and the number of the next step."""
    with LogReader(trace) as reader:
        events = [event for line in reader.lines_from(0) if isinstance(event := line.event(), Launched | StepCompleted)]
    decoding = {event.step for event in events if isinstance(event, Launched) and not event.chunks}
    steps = [event for event in events if isinstance(event, StepCompleted)]
    own = [step for step in steps if step.step >= first_step and step.step in decoding]
    num_tokens = sum(sum(step.produced) for step in own)
    stages = [step.stages or [(step.start_ns, step.end_ns)] for step in own]
    busy_ns = max(sum(end - start for start, end in times) for times in zip(*stages, strict=True))
    elapsed_ns = own[-1].end_ns - own[0].end_ns
    return Rates(1e9 * (num_tokens - sum(own[0].produced)) / elapsed_ns, 1e9 * num_tokens / busy_ns), steps[-1].step + 1


def measure(model: str, num_clients: int, num_stages: int, num_tokens: int, rounds: int) -> list[tuple[Rates, Rates]]:
    """Of each round: the pipeline's, then one worker's."""
    prompts = [[5 + client, *range(5, 4 + PROMPT_TOKENS)] for client in range(num_clients)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": num_clients, "max_model_len": PROMPT_TOKENS + num_tokens}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(model, record=f"{folder}/s", pipeline_parallel_size=num_stages, threads=1, **options) as pipeline,
        LLM(model, record=f"{folder}/w", threads=num_stages, **options) as worker,
    ):
        found: list[list[Rates]] = [[], []]
        next_step = [0, 0]
        for _ in range(rounds + 1):
            for number, (llm, name) in enumerate([(pipeline, "s"), (worker, "w")]):
                llm.generate(prompts, params, use_tqdm=False)
                trace = Path(folder, name, "latest", "trace.jsonl")
                rates, next_step[number] = read_rates(trace, next_step[number])
                found[number].append(rates)
    # The first round warms up.
    return list(zip(*found, strict=True))[1:]


def main() -> None:
    """Print the rates and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.model, options.clients, options.stages, options.tokens, options.rounds)
    rows = [
        ("pipeline, tokens/s", [stages.measured for stages, _ in found]),
        ("its slowest stage alone", [stages.bound for stages, _ in found]),
        ("of that", [stages.measured / stages.bound for stages, _ in found]),
        ("one worker, tokens/s", [worker.measured for _, worker in found]),
        ("of that", [stages.measured / worker.measured for stages, worker in found]),
    ]
    cells = [
        [name, *(f"{value:.2f}" for value in (statistics.median(each), min(each), max(each)))] for name, each in rows
    ]
    print(*table(["", "median", "least", "most"], cells), sep="\n")


if __name__ == "__main__":
    main()
