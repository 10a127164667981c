"""Time of the sampling stage, beside the time that reading its logits once takes.

    python benchmarks/cpu/sampler.py [--batches 32 256] [--vocab-sizes 49152 151936] [--dtype bfloat16] [--threads N]

Logits are random with a model's spread (standard deviation 3, a few far above). The limit is one pass of `amax` over
them in the same run, the cheapest thing that reads each of their bytes; the ratio is to that. Penalties are of
sequences with 500 prompt and 500 output tokens. Times are the least of some rounds, in turns. Nothing else should run
on the machine: where threads have to wait for each other, small operations suffer most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import NewSequence
from eventlm.worker.sampling.sampler import Sampler
from eventlm.worker.sequence_table import WorkerSequence

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy + penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "top-p + penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
}
NUM_PROMPT_TOKENS = NUM_OUTPUT_TOKENS = 500


def make_logits(batch: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random logits [batch, vocab_size]: a bulk, and 20 likely tokens a row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, vocab_size, generator=generator) * 3
    likely = torch.randint(vocab_size, (batch, 20), generator=generator)
    return logits.scatter_(1, likely, torch.rand(batch, 20, generator=generator) * 8 + 12).to(dtype)


def make_sequences(batch: int, vocab_size: int, params: dict[str, Any]) -> list[WorkerSequence]:
    """Sequences in the middle of their output."""
    length = NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS
    ids = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)).tolist()
    return [
        WorkerSequence(
            NewSequence(
                request=number,
                index=0,
                token_ids=ids[number],
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                params=SamplingParams(seed=number, **params),
            )
        )
        for number in range(batch)
    ]


def prepare(case: dict[str, Any], logits: torch.Tensor) -> Callable[[], Any]:
    """One step's sampling of this case."""
    batch, vocab_size = logits.shape
    sequences = make_sequences(batch, vocab_size, case)
    sampler = Sampler(vocab_size, logits.device)
    for sequence in sequences:
        sampler.table.add(sequence)
    return lambda: sampler.sample(logits, sequences)


def measure(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least seconds of each, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    """Print a table for each batch and vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}")
    with torch.inference_mode():
        for vocab_size in args.vocab_sizes:
            for batch in args.batches:
                logits = make_logits(batch, vocab_size, getattr(torch, args.dtype))
                functions = {name: prepare(case, logits) for name, case in CASES.items()}
                times = measure({"read once": lambda logits=logits: logits.amax(dim=-1)} | functions, args.rounds)
                limit = times["read once"]
                print(f"\nbatch {batch}, vocabulary {vocab_size}, {logits.nbytes / 2**20:.0f} MiB of logits")
                for name, seconds in times.items():
                    print(f"  {name:<20} {seconds * 1e3:8.2f} ms {seconds / limit:7.1f} x")


if __name__ == "__main__":
    main()
