"""Engines through the offline API, and the work that they are given."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_harness.row import Context
from eventlm import LLM, RequestOutput, SamplingParams
from eventlm.core.predictor import DEFAULT_COEFFICIENTS

#: Token ids of prompts are below this, as in nano-vLLM's benchmark.
NUM_PROMPT_TOKENS = 10_000
WARM_UP_TOKENS = 3
#: Step times that are given need not be measured.
SMOKE_OPTIONS: dict[str, Any] = {
    "num_blocks": 128,
    "max_model_len": 256,
    "predictor": list(DEFAULT_COEFFICIENTS),
}


class Workload(NamedTuple):
    """Prompts, and how many tokens are to be generated for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    def first(self, number: int) -> Workload:
        """So many of them."""
        return Workload(self.prompts[:number], self.output_lens[:number])

    def only(self, index: int) -> Workload:
        """The one at a place."""
        return Workload([self.prompts[index]], [self.output_lens[index]])


class Run(NamedTuple):
    """What came of a workload, and how long it took."""

    outputs: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Of all outputs."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each output."""
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


def nano_workload(context: Context, *, num_seqs: int = 256, shortest: int = 100, longest: int = 1024) -> Workload:
    """What nano-vLLM's bench.py draws: prompts and outputs of 100 to 1,024 tokens, from seed 0; tiny in a smoke run."""
    if context.smoke:
        num_seqs, shortest, longest = min(num_seqs, 3), 3, 5
    draw = random.Random(0)
    below = smoke_tokens(context, NUM_PROMPT_TOKENS)
    prompts = [[draw.randint(0, below) for _ in range(draw.randint(shortest, longest))] for _ in range(num_seqs)]
    return Workload(prompts, [draw.randint(shortest, longest) for _ in range(num_seqs)])


def even_workload(context: Context, *, num_seqs: int, prompt_len: int, output_len: int, seed: int = 0) -> Workload:
    """All of the same lengths; tiny in a smoke run."""
    if context.smoke:
        num_seqs, prompt_len, output_len = min(num_seqs, 3), min(prompt_len, 6), min(output_len, 4)
    draw = random.Random(seed)
    below = smoke_tokens(context, NUM_PROMPT_TOKENS)
    return Workload(
        [[draw.randint(0, below) for _ in range(prompt_len)] for _ in range(num_seqs)], [output_len] * num_seqs
    )


def smoke_tokens(context: Context, largest: int) -> int:
    """The largest token id of prompts: the vocabulary of a smoke run is small."""
    return min(largest, 500) if context.smoke else largest


def start(context: Context, model: Path, **options: Any) -> LLM:
    """An engine on the GPU."""
    return LLM(model, **engine_options(context) | options)


def engine_options(context: Context) -> dict[str, Any]:
    """Of every engine."""
    return {"device": "cuda"} | (SMOKE_OPTIONS if context.smoke else {})


def generate(llm: LLM, workload: Workload, *, temperature: float = 0.6, **params: Any) -> Run:
    """Give all of it at once, to be generated to its full length."""
    each = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length, **params)
        for length in workload.output_lens
    ]
    began = time.perf_counter()
    outputs = llm.generate(workload.prompts, each, use_tqdm=False)
    return Run(outputs, time.perf_counter() - began)


def warm_up(llm: LLM, workload: Workload) -> int:
    """Generate a few tokens of what is not in the workload; how many requests that were."""
    prompts = [prompt[::-1][: len(prompt) // 2] for prompt in workload.prompts[:8]]
    generate(llm, Workload(prompts, [WARM_UP_TOKENS] * len(prompts)))
    return len(prompts)
