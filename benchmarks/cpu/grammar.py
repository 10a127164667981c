"""Time of a step with grammars, beside the same step without: what structured output costs each token.

    python benchmarks/cpu/grammar.py [--model smollm2] [--batch 8] [--tokens 64] [--rounds 7] [--threads N]

Both draw at temperature 1 from the same prompts for the same number of steps on the worker's own code, in rounds that
take turns; the ratio of a round is of its two medians, so that a machine whose pace drifts does not show in it. With
grammars each row writes a JSON array of records that does not end within the run, each of a schema of its own. The
table says where the time goes: `grammar` is how long the step waits for masks that the model's forward pass did not
hide, `sample` has their use on the logits, `record` the step in the grammar with what was drawn. Schemas are built
before, and the time that it takes is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# As in the worker: threads that spin while they wait slow everything down on a machine that has other things to do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from eventlm.bootstrap.model_source import find_model
from eventlm.config import ModelConfig
from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.text.grammar import json_schema_grammar
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import NewSequence, StepOutput, StepPayload, WorkerSetup

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64
#: The largest ratio that is meant to be.
TARGET = 1.15


class Round(NamedTuple):
    """Nanoseconds of each step, and of each operation over all of them."""

    steps: list[int]
    ops: Counter[str]


def schema_of(row: int) -> dict[str, object]:
    """Records of a few kinds of fields; longer than any run."""
    record = {
        "type": "object",
        "properties": {
            f"name_{row}": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "role": {"enum": ["admin", "editor", "reader", f"guest {row}"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
        },
        "required": [f"name_{row}", "age", "role", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 1000}


class Bench:
    """A worker's runner with room for the batch."""

    def __init__(self, model: str, batch: int, num_tokens: int, threads: int) -> None:
        self.batch, self.num_tokens = batch, num_tokens
        self._blocks_per_row = -(-(NUM_PROMPT_TOKENS + num_tokens + 1) // BLOCK_SIZE)
        self.runner = ModelRunner(
            WorkerSetup(
                replica=0,
                epoch=1,
                model=model,
                block_size=BLOCK_SIZE,
                num_blocks=batch * self._blocks_per_row,
                max_model_len=1024,
                max_num_batched_tokens=4096,
                max_num_seqs=batch,
                threads=threads,
                profile_ops=True,
            )
        )

    def run(self, grammars: list[str]) -> Round:
        """One round: the prompts in a first step that is not counted, then a step a token."""
        rows = range(self.batch)
        new = [
            NewSequence(
                request=row,
                index=0,
                token_ids=[(7 * index + row) % 1000 + 100 for index in range(NUM_PROMPT_TOKENS)],
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                params=SamplingParams(seed=row, ignore_eos=True, grammar=grammars[row] if grammars else ""),
            )
            for row in rows
        ]
        size = self._blocks_per_row
        self._step(
            0,
            StepPayload(new=new),
            chunks=[(row, 0, 0, NUM_PROMPT_TOKENS, 1) for row in rows],
            blocks=[(row, 0, list(range(row * size, row * size + size))) for row in rows],
        )
        found = Round([], Counter())
        for step in range(1, self.num_tokens):
            start_ns = time.perf_counter_ns()
            output = self._step(step, StepPayload(), decodes=[(row, 0, NUM_PROMPT_TOKENS + step, 0) for row in rows])
            found.steps.append(time.perf_counter_ns() - start_ns)
            found.ops.update(output.ops)
            assert not output.ends, "a text ended, so its row is no longer what is measured"
        self._step(0, StepPayload(), forget=[(row, 0) for row in rows])
        return found

    def _step(self, step: int, payload: StepPayload, **fields: object) -> StepOutput:
        launch = Launched(replica=0, epoch=1, step=step, num_tokens=0, predicted_ns=0, **fields)  # type: ignore[arg-type]
        return self.runner.execute(launch, payload)


def report(plain: list[Round], matched: list[Round], ratios: list[float]) -> None:
    """Where the time goes, and what is left of it all."""
    columns = [_per_step(rounds) for rounds in (plain, matched)]
    print(f"\n{'us a step':<14} {'without':>10} {'with':>10} {'more':>10}")
    for name in sorted({*columns[0], *columns[1]}, key=lambda name: -columns[1].get(name, 0.0)):
        one, other = (column.get(name, 0.0) for column in columns)
        print(f"{name:<14} {one:>10.0f} {other:>10.0f} {other - one:>10.0f}")
    totals = [statistics.median(value for each in rounds for value in each.steps) / 1e3 for rounds in (plain, matched)]
    print(f"{'all (median)':<14} {totals[0]:>10.0f} {totals[1]:>10.0f} {totals[1] - totals[0]:>10.0f}")
    print(f"\nratio by round: {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"median ratio: {statistics.median(ratios):.3f} (target: at most {TARGET})")


def _per_step(rounds: list[Round]) -> dict[str, float]:
    """Median over rounds of the mean microseconds of each operation."""
    names = {name for each in rounds for name in each.ops}
    return {name: statistics.median(each.ops[name] / len(each.steps) for each in rounds) / 1e3 for name in names}


def main() -> int:
    """Print the table; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    folder = find_model(ModelConfig(model=args.model)).folder
    if folder is None:
        parser.error("the fake model computes nothing that could be measured")
    bench = Bench(str(Path(folder)), args.batch, args.tokens, args.threads)
    grammars = [json_schema_grammar(schema_of(row), "schema") for row in range(args.batch)]
    print(f"{args.model}, batch {args.batch}, {args.tokens} tokens, {torch.get_num_threads()} threads")
    start = time.perf_counter()
    bench.runner.compiler.prepare(grammars[0]).result()
    first = time.perf_counter() - start
    for grammar in grammars[1:]:
        bench.runner.compiler.prepare(grammar).result()
    others = (time.perf_counter() - start - first) / max(len(grammars) - 1, 1)
    print(f"building: {first * 1e3:.0f} ms for the vocabulary and the first schema, {others * 1e3:.1f} ms for another")
    plain: list[Round] = []
    matched: list[Round] = []
    for turn in range(args.rounds + 1):
        pair = [bench.run(grammars), bench.run([])] if turn % 2 else [bench.run([]), bench.run(grammars)][::-1]
        if turn:
            matched.append(pair[0])
            plain.append(pair[1])
    ratios = [
        statistics.median(one.steps) / statistics.median(other.steps) for one, other in zip(matched, plain, strict=True)
    ]
    report(plain, matched, ratios)
    return 0 if statistics.median(ratios) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
