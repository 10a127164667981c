"""Keys and values in fp8: what it gains where they are most of what a step reads, and how many more tokens fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import even_workload, generate, start, warm_up
from benchmarks.gpu_harness.row import Context, Parts, Row, speed
from eventlm.bus.log_reader import LogReader

#: Bytes of a head's keys with their scale, against two bytes each: what fp8 can gain at most is a little less than 2.
LEAST_MORE_TOKENS = 1.85


def parts(context: Context) -> Parts:
    """One measurement."""
    return {"fp8": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    model = qwen(context, "0.6B")
    workload = even_workload(context, num_seqs=128, prompt_len=2048, output_len=128)
    rates, num_blocks, tokens = [], [], []
    for dtype in ("auto", "fp8"):
        with start(context, model, kv_cache_dtype=dtype, record=Path(context.folder) / "runs") as llm:
            warm_up(llm, workload)
            run = generate(llm, workload, temperature=0.0)
            folder = llm.run_folder
        assert folder is not None
        with LogReader(folder) as log:
            num_blocks.append(log.header.core.num_blocks)
        rates.append(run.rate)
        tokens.append(run.token_ids)
    same = sum(_common_prefix(*pair) for pair in zip(*tokens, strict=True)) / sum(workload.output_lens)
    yield speed(
        f"{len(workload.prompts)} sequences after prompts of {len(workload.prompts[0]):,} tokens, fp8 KV",
        rates[1],
        "tok/s",
        limit=rates[0],
        limit_name="bf16 KV",
        note=f"{same:.0%} of the tokens before the first that differs; weights are random",
    )
    yield speed(
        "KV blocks in the same memory",
        num_blocks[1],
        "",
        limit=num_blocks[0],
        limit_name="bf16 KV",
        target=LEAST_MORE_TOKENS,
    )


def _common_prefix(one: list[int], other: list[int]) -> int:
    for index, (token, its) in enumerate(zip(one, other, strict=True)):
        if token != its:
            return index
    return len(one)
