"""`LLM` and the server with a model that is split over processes: no token changes, not even when one of them dies."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eventlm import LLM, SamplingParams, StructuredOutputsParams
from eventlm.core.shards import Layout
from eventlm.events import Launched, Preempted, StepCompleted, WorkerLost
from eventlm.replay.explain.explainer import explain
from tests.checkpoints import make_checkpoint
from tests.replay.explained_logs import check_steps, check_sums, read
from tests.serving import serve, verified

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. ",
    "It was the best of times, ",
    "In the beginning ",
    "there was one log, ",
]
REGEX = StructuredOutputsParams(regex="[a-f ]*x")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, max_tokens=16, structured_outputs=REGEX),
    SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1, ignore_eos=True),
]
#: Few blocks, so that sequences preempt each other, and small steps, so that prompts come in chunks.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 24,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 92,
    "threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family="qwen3", num_heads=6, num_kv_heads=3)


def all_children() -> set[int]:
    """Of all threads of this process."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        # The thread may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    """Of one worker."""
    with LLM(folder, **OPTIONS) as llm:
        return tokens_of(llm)


def test_a_split_model_gives_the_tokens_of_one_worker(
    folder: Path, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    before = all_children()
    layout = Layout(2, 2)
    with LLM(folder, record=tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, **OPTIONS) as llm:
        assert tokens_of(llm) == expected
        ranks = sorted(all_children() - before)
        assert len(ranks) == layout.num_ranks
        # One that does not sample, and is not the first of its stage.
        os.kill(ranks[1], signal.SIGKILL)
        assert tokens_of(llm) == expected
    trace = verified(tmp_path / "latest" / "trace.jsonl")
    assert [(lost.rank, lost.reason) for lost in trace.of(WorkerLost)] == [(1, "died (killed by SIGKILL)")]
    for step in trace.of(StepCompleted):
        times = [time_ns for stage in step.stages for time_ns in stage]
        assert len(times) == 2 * layout.stages
        assert times == sorted(times)
    assert trace.result.clean_end
    log = read(tmp_path / "latest" / "trace.jsonl")
    causes = set()
    for explanation in explain(log.path, log.requests).explanations:
        check_sums(explanation)
        if not explanation.preemptions:
            check_steps(explanation, log)
        causes |= {interval.cause for interval in explanation.intervals}
    # Whether steps meet at a stage is up to the machine.
    assert {"step", "exchange"} <= causes


def test_kv_groups_give_the_tokens_of_one_worker(folder: Path, expected: list[list[list[int]]], tmp_path: Path) -> None:
    options = {**OPTIONS, "num_blocks": 9, "max_model_len": 64, "kv_parallel_size": 2, "kv_shard_tokens": 8}
    with LLM(folder, record=tmp_path, **options) as llm:
        assert tokens_of(llm) == expected
    trace = verified(tmp_path / "latest" / "trace.jsonl")
    # Rows that both groups compute.
    assert any(sum(each.loads) > each.num_tokens and min(each.loads) for each in trace.of(Launched))
    assert trace.of(Preempted)


def test_a_server_splits_its_model(folder: Path, expected: list[list[list[int]]], tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with serve(tmp_path, "--model", str(folder), "--tensor-parallel-size", "3", *flags) as server:
        reply = server.complete(prompt=PROMPTS[0], max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
        assert json.loads(reply.data)["choices"][0]["token_ids"] == expected[0][0]
