"""Tokens that do not depend on the batch: whether they do not, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start, warm_up
from benchmarks.gpu_harness.row import Context, Parts, Row, check, speed

#: Of the sequences of the batch, those that are generated alone too.
NUM_ALONE = 6
SMOKE_NUM_ALONE = 1


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"batch invariance": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    model = qwen(context, "0.6B")
    workload = even_workload(context, num_seqs=256, prompt_len=256, output_len=128)
    rates = []
    for is_invariant in (False, True):
        # Cached blocks would spare the second pass a part of what it is to compute.
        with start(context, model, batch_invariant=is_invariant, prefix_cache=False) as llm:
            warm_up(llm, workload)
            batched = generate(llm, workload, temperature=0.0)
            rates.append(batched.rate)
            num_alone = SMOKE_NUM_ALONE if context.smoke else NUM_ALONE
            alone = [generate(llm, workload.only(index), temperature=0.0).token_ids[0] for index in range(num_alone)]
        differ = sum(tokens != together for tokens, together in zip(alone, batched.token_ids, strict=False))
        what = f"of {num_alone} sequences, those that differ alone and among {len(workload.prompts)}"
        if is_invariant:
            yield check(what, differ, "", at_most=0)
        else:
            yield Row(what=f"{what}, without", measured=differ)
    yield speed("throughput with batch invariance", rates[1], "tok/s", limit=rates[0], limit_name="without")
