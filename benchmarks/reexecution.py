"""Whether a recorded run gives the same tokens when it is executed again: several loads, each recorded and re-executed.

    python benchmarks/reexecution.py [--tokens 100000] [--model FOLDER] [--dtypes bfloat16,float32] [--keep FOLDER]

The loads differ in what has a say in a batch's shape and in what is sampled: 1 to 32 sequences at once, a pool so small
that sequences are preempted, prompts that share prefixes, penalties and masks and seeds, two replicas. The output
tokens asked for are divided among them; a batch of 32 gives most of them, because it takes the least time for each.

At the end comes a control that must fail: a run of its own is executed again with every row in a step alone, from the
recorded tokens. It is computed in torch, where a bfloat16 row's logits depend on the batch in their last bits, so some
tokens must differ; if none does, the comparison would be worth nothing. (In float32 they differ too seldom for that,
and with most builds of the compiled forward pass never.)

Exit code 0 if every load came out identical and the control did not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvloop

# As a script this has its own folder on the path, and not the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows_alone import RowsAlone
from eventlm.bus.trace_info import info
from eventlm.cli.logging_setup import configure_logging
from eventlm.config import CacheConfig, Config, ModelConfig, RecordConfig, SchedulerConfig, WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import Request
from eventlm.engine.setup import make_setup
from eventlm.models.config import read_model
from eventlm.models.fetch.pull import pull
from eventlm.replay.execute.execution import ExecuteResult, execute
from eventlm.replay.execute.report import render
from eventlm.replay.execute.workers import WorkerProcesses
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from eventlm.table import table

MAX_MODEL_LEN = 1024
#: Of the tokens asked for, what the control gets, at most so many: it takes a step for each row.
CONTROL_SHARE, MAX_CONTROL_TOKENS = 0.2, 4000

#: Of weights and KV cache.
Dtype = Literal["bfloat16", "float16", "float32"]

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
MASKED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 50}
PENALIZED: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_p": 0.02}


class Load(NamedTuple):
    """One kind of work. share: of all tokens. params: taken in turn. prefix_tokens: that all prompts begin with."""

    name: str
    share: float
    max_num_seqs: int
    params: list[dict[str, Any]]
    num_blocks: int = 2048
    prompt_tokens: tuple[int, int] = (16, 200)
    output_tokens: tuple[int, int] = (32, 160)
    prefix_tokens: int = 0
    n: int = 1
    replicas: int = 1
    worker: WorkerConfig = WorkerConfig()


LOADS = [
    Load("one at a time", 0.02, 1, [GREEDY, DRAWN]),
    Load("up to 4", 0.06, 4, [DRAWN, MASKED]),
    Load("up to 8, penalties", 0.12, 8, [PENALIZED, GREEDY]),
    Load("up to 32, greedy", 0.20, 32, [GREEDY]),
    Load("up to 32, all kinds", 0.20, 32, [GREEDY, DRAWN, MASKED, PENALIZED]),
    Load("tight blocks", 0.16, 16, [DRAWN, PENALIZED], num_blocks=40, prompt_tokens=(8, 40)),
    Load("shared prefixes, n=2", 0.14, 32, [DRAWN, MASKED], prefix_tokens=144, n=2),
    Load("two replicas", 0.10, 16, [DRAWN, GREEDY], replicas=2),
]
CONTROL = Load("control: rows alone", 1.0, 16, [GREEDY, DRAWN], worker=WorkerConfig(cpu_kernels="torch"))


class Outcome(NamedTuple):
    """A load that was recorded and executed again. Times are wall times in seconds."""

    load: Load
    dtype: Dtype
    num_preemptions: int
    record_s: float
    execute_s: float
    result: ExecuteResult


def requests(load: Load, num_tokens: int, vocab_size: int) -> Iterator[Request]:
    """So many that together they give at least `num_tokens`; where that is little, of less each, to fill the batch."""
    rng = random.Random(load.name)
    most = max(num_tokens // load.max_num_seqs // load.n, 8)
    prefix = [rng.randrange(vocab_size) for _ in range(load.prefix_tokens)]
    number = 0
    while num_tokens > 0:
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*load.prompt_tokens))]
        max_tokens = min(rng.randint(*load.output_tokens), most)
        params = SamplingParams(
            n=load.n, max_tokens=max_tokens, ignore_eos=True, **load.params[number % len(load.params)]
        )
        yield Request(
            prompt_token_ids=prefix + prompt, sampling=params, scheduling=SchedulingParams(model="m", offline=True)
        )
        num_tokens -= max_tokens * load.n
        number += 1


async def record(load: Load, model: str, dtype: Dtype, num_tokens: int, folder: Path) -> Path:
    """Run the load, all of it submitted at once; the run's folder."""
    config = Config(
        model=ModelConfig(model=model, dtype=dtype),
        cache=CacheConfig(num_blocks=load.num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=load.max_num_seqs, replicas=load.replicas),
        worker=load.worker,
        record=RecordConfig(record=str(folder), record_tokens=True, record_keep="1TiB", validate_every=0),
    )
    longest = min(MAX_MODEL_LEN, (load.num_blocks - 1) * config.cache.block_size)
    setup = make_setup(config, model=model, model_name="m", num_blocks=load.num_blocks, max_model_len=longest)
    engine = InferenceEngine(setup, real_system())
    await engine.start()
    try:
        handles = await engine.submit(list(requests(load, num_tokens, read_model(model).vocab_size)))

        async def read(handle: Any) -> None:
            async for _ in handle:
                pass

        await asyncio.gather(*map(read, handles))
    finally:
        await engine.stop()
    assert engine.run_folder is not None
    return engine.run_folder


def run(load: Load, model: str, dtype: Dtype, num_tokens: int, folder: Path, **options: Any) -> Outcome:
    """Record a load, and execute it again with `options`."""
    start = time.perf_counter()
    run_folder = uvloop.run(record(load, model, dtype, num_tokens, folder))
    middle = time.perf_counter()
    result = execute(run_folder, model=model, **options)
    end = time.perf_counter()
    return Outcome(load, dtype, info(run_folder).num_preemptions, middle - start, end - middle, result)


def row(outcome: Outcome) -> list[str]:
    """A line of the table."""
    result, num_differing = outcome.result, len(outcome.result.mismatches)
    num_tokens = result.num_tokens + num_differing
    return [
        outcome.load.name,
        outcome.dtype,
        f"{num_tokens:,}",
        f"{result.num_steps:,}",
        f"{num_tokens / max(result.num_steps, 1):.1f}",
        f"{outcome.num_preemptions:,}",
        f"{outcome.record_s:.0f}",
        f"{outcome.execute_s:.0f}",
        f"{num_differing:,} differ" if num_differing else "identical",
    ]


def main() -> int:
    """Run all loads and the control, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="output tokens of all loads together, each dtype")
    parser.add_argument("--model", help="checkpoint folder; the default model if left out")
    parser.add_argument("--dtypes", default="bfloat16", help="of weights and KV cache, one after the other")
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in")
    arguments = parser.parse_args()
    configure_logging(default_level="warning")
    model = arguments.model or str(pull())
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        outcomes = []
        for dtype in arguments.dtypes.split(","):
            for load in LOADS:
                outcomes.append(run(load, model, dtype, int(load.share * arguments.tokens), folder))
                print(f"{dtype}, {load.name}: {render(outcomes[-1].result)}", file=sys.stderr)
        num_tokens = min(int(CONTROL_SHARE * arguments.tokens), MAX_CONTROL_TOKENS)
        alone: dict[str, Any] = {
            "teacher_force": True,
            "make_workers": lambda setup, header: RowsAlone(WorkerProcesses(setup, header)),
        }
        control = run(CONTROL, model, "bfloat16", num_tokens, folder, **alone)
    names = ["load", "dtype", "tokens", "steps", "a step", "preempted", "record s", "again s", "outcome"]
    print("\n".join(table(names, [row(outcome) for outcome in (*outcomes, control)], left=range(2))))
    is_identical = all(outcome.result.exit_code == 0 for outcome in outcomes)
    total = sum(outcome.result.num_tokens for outcome in outcomes)
    differing = sum(len(outcome.result.mismatches) for outcome in outcomes)
    print(f"{total:,} tokens identical, {differing:,} not; the control differs in {len(control.result.mismatches):,}")
    return 0 if is_identical and control.result.mismatches else 1


if __name__ == "__main__":
    sys.exit(main())
