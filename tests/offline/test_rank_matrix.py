"""`LLM` with several ranks, against one worker: the same tokens, whatever is asked for and whoever is preempted.

Each run has real processes, and a pool that is too small for all of its requests.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import signal
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eventlm import LLM, SamplingParams
from eventlm.engine.replicas import controller
from eventlm.events import WorkerLost
from eventlm.offline import RequestOutput, StructuredOutputsParams
from eventlm.offline.outputs import CompletionOutput
from eventlm.replay.execute.execution import execute
from eventlm.replay.verify.verifier import verify
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.families.test_qwen_next import CASES as HYBRIDS
from tests.processes import is_running, wait_until
from tests.serving import verified

pytestmark = pytest.mark.long

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "attention_bias": True},
    "three key heads, tied": {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
    "qwen3, tied": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "tie_word_embeddings": True},
    "experts": {"architecture": "Qwen3MoeForCausalLM", **EXPERTS},
    "delta": HYBRIDS["qwen 3.5"],
    "convolutions": {"architecture": "Lfm2ForCausalLM", "full_attn_idxs": [1], "block_multiple_of": 32},
}
HAVE_STATES = ("delta", "convolutions")

SHARD_TOKENS = 16
#: Options of `LLM`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "T2": {"tensor_parallel_size": 2},
    "T3": {"tensor_parallel_size": 3},
    "S2": {"pipeline_parallel_size": 2},
    "S3": {"pipeline_parallel_size": 3},
    "T2xS2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    # Contexts of up to 10 shards. Each group has a pool of its own.
    "K2": {"kv_parallel_size": 2, "kv_shard_tokens": SHARD_TOKENS, "num_blocks": 18},
    "K3xT2": {"kv_parallel_size": 3, "tensor_parallel_size": 2, "kv_shard_tokens": SHARD_TOKENS, "num_blocks": 12},
}
CASES = [
    (model, layout)
    for model in MODELS
    for layout, options in LAYOUTS.items()
    # A recurrent state lies in one place.
    if model not in HAVE_STATES or "kv_parallel_size" not in options
]
#: As on another host: the ranks have no memory in common.
OVER_GLOO: dict[str, Any] = {"launcher": {"type": "tests.launchers.loopback:LoopbackLauncher"}}

#: Of log-probabilities in float32. Tokens may differ only where the best two are as near.
TOLERANCE = 1e-4
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 3, "n": 3},
    {"temperature": 0.9, "seed": 6, "top_k": 20, "top_p": 0.9, "logprobs": 3, "n": 2},
    {"temperature": 0.0, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {9: 3.0}},
    {"temperature": 1.2, "seed": 7, "min_p": 0.02, "frequency_penalty": 0.4},
]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-c]{3,9}[0-9]+x"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]


class Run(NamedTuple):
    """What a layout said, and where it is recorded."""

    outputs: list[RequestOutput]
    folder: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model; only those that are asked for are made."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            folder = self[name] = tmp_path_factory.mktemp("model")
            made = {**SMALL, "num_hidden_layers": 3, "eos_token_id": 1, **MODELS[name], "vocab_size": VOCAB_SIZE}
            make_checkpoint(folder, **{key: value for key, value in made.items() if key != "bos_token_id"})
            make_tokenizer(folder)
            return folder

    return Folders()


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one worker says of so many requests to a model."""
    found: dict[tuple[str, int], Run] = {}

    def run(name: str, num_requests: int) -> Run:
        if (name, num_requests) not in found:
            found[name, num_requests] = serve(folders[name], name, tmp_path_factory.mktemp("run"), num_requests)
        return found[name, num_requests]

    return run


def asked(num_requests: int, *, seed: int = 8, has_grammars: bool = True) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts, and what is asked for with each. Half of them share a beginning with others, some are long."""
    rng = random.Random(seed)
    shared = [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (21, 40)]
    prompts, params = [], []
    for number in range(num_requests):
        own = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randrange(1, 40) + (60 if number % 10 == 5 else 0))]
        prompts.append({"prompt_token_ids": (shared[number % len(shared)] if number % 4 < 2 else []) + own})
        if number % 7 == 3 and has_grammars:
            structure = StructuredOutputsParams(**GRAMMARS[number // 7 % len(GRAMMARS)])
            params.append(SamplingParams(temperature=1.0, seed=number, max_tokens=24, structured_outputs=structure))
        else:
            each = PARAMS[number % len(PARAMS)]
            params.append(SamplingParams(max_tokens=rng.randrange(4, 28), ignore_eos=number % 3 > 0, **each))
    return prompts, params


SIZES: dict[str, Any] = {
    "max_model_len": 168,
    "num_blocks": 36,
    "block_size": 8,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
    "threads": 1,
    "predictor": [1000] * 5,
    "dtype": "float32",
}


def serve(
    model: str | Path,
    name: str,
    folder: Path,
    num_requests: int,
    *,
    seed: int = 8,
    has_grammars: bool = True,
    **options: Any,
) -> Run:
    """Generate what is `asked`, and record it."""
    sizes = SIZES | ({"state_slots": 56, "state_interval": 16} if name in HAVE_STATES else {})
    prompts, params = asked(num_requests, seed=seed, has_grammars=has_grammars)
    with LLM(model, record=folder, record_tokens=True, **sizes | options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.run_folder is not None
    run = Run(outputs, llm.run_folder)
    trace = (run.folder / "trace.jsonl").read_text()
    assert '"t":"preempt"' in trace
    assert '"t":"worker_lost"' not in trace
    result = verify(run.folder)
    assert (result.exit_code, result.divergence, result.clean_end) == (0, None, True)
    return run


def assert_alike(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> int:
    """The same tokens, and log-probabilities within the tolerance; how many tokens.

    A sequence whose tokens differ is compared up to there, which must be where the best two are equally likely.
    """
    num_tokens = 0
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_near(mine.prompt_logprobs, theirs.prompt_logprobs)
        assert len(mine.outputs) == len(theirs.outputs)
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            same = num_same(one.token_ids, other.token_ids)
            if one.token_ids == other.token_ids:
                assert one.finish_reason == other.finish_reason
                assert one.text == other.text
            else:
                assert is_tie(other, same), (number, one.token_ids, other.token_ids)
            assert_near((one.logprobs or [])[:same], (other.logprobs or [])[:same])
            num_tokens += same
    return num_tokens


def longest(output: RequestOutput) -> int:
    """Tokens of the longest sequence of a request."""
    return len(output.prompt_token_ids) + max(len(each.token_ids) for each in output.outputs)


def num_same(one: list[int], other: list[int]) -> int:
    """Tokens until they differ."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(one), len(other)))


def is_tie(output: CompletionOutput, place: int) -> bool:
    """Whether the best two tokens there are as near as rounding may tell."""
    return bool(output.logprobs) and place < len(output.token_ids) and gap_at(output, place) <= TOLERANCE


def gap_at(output: CompletionOutput, place: int) -> float:
    """Between the best two tokens."""
    assert output.logprobs is not None
    best = sorted((each.logprob for each in output.logprobs[place].values()), reverse=True)
    return best[0] - best[1]


def assert_near(found: Any, expected: Any) -> None:
    """Of logprobs or prompt logprobs: of each token that both name. The last of several may change places."""
    assert (found is None) == (expected is None)
    for mine, theirs in zip(found or [], expected or [], strict=True):
        assert (mine is None) == (theirs is None)
        both = (mine or {}).keys() & (theirs or {}).keys()
        assert len(both) >= len(theirs or {}) - 1
        for token in both:
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "layout", "num_requests"),
    [pytest.param(*case, 200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]) for case in CASES],
)
def test_ranks_say_what_one_worker_says(
    folders: dict[str, Path], alone: Any, tmp_path: Path, name: str, layout: str, num_requests: int
) -> None:
    run = serve(folders[name], name, tmp_path, num_requests, **LAYOUTS[layout])
    num_tokens = assert_alike(run.outputs, alone(name, num_requests).outputs)
    print(f"{name}, {layout}: {num_tokens:,} tokens of {num_requests} requests")
    assert num_tokens > 12 * num_requests
    # Its last token is in the ninth shard, or later.
    assert max(map(longest, run.outputs)) > 8 * SHARD_TOKENS


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_ranks_of_the_default_model_say_what_one_worker_says(tmp_path: Path) -> None:
    runs = [
        serve("smollm2:bf16", "", tmp_path / name, 60, **options)
        for name, options in {"alone": {}, "T2": LAYOUTS["T2"]}.items()
    ]
    num_tokens = assert_alike(runs[1].outputs, runs[0].outputs)
    print(f"{num_tokens:,} tokens")
    assert num_tokens > 12 * 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["T2", "T3", "K2", "K3xT2"])
def test_shared_memory_and_gloo_give_the_same_bits(folders: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """Where nothing depends on when a step ends: with one in flight, and no grammar that is built beside it. For
    pipelines see `test_model_runner_ranks`.
    """
    transports: dict[str, dict[str, Any]] = {"shared": {}, "carried": OVER_GLOO}
    runs = [
        serve(
            folders["three key heads, tied"],
            "",
            tmp_path / name,
            60,
            max_steps_in_flight=1,
            has_grammars=False,
            **LAYOUTS[layout],
            **others,
        )
        for name, others in transports.items()
    ]
    shared, carried = (
        [(each.prompt_logprobs, [(one.token_ids, one.logprobs) for one in each.outputs]) for each in run.outputs]
        for run in runs
    )
    assert shared == carried


def likely(model: str | Path, prompts: Any, **options: Any) -> list[float]:
    """The log-probability of each token of the prompts but the first ones."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, **{"num_blocks": 400, "threads": 1, "predictor": [1000] * 5, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        each[token].logprob
        for output in outputs
        for each, token in zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=True)
        if each is not None
    ]


def check_no_farther(exact: list[float], alone: list[float], split: list[float]) -> None:
    """By the root of the mean square of the differences. What is left is chance."""
    one, several = (
        math.sqrt(statistics.fmean((mine - right) ** 2 for mine, right in zip(found, exact, strict=True)))
        for found in (alone, split)
    )
    print(f"{several:.5f}, one worker: {one:.5f}, of {len(exact):,} tokens")
    assert several <= 1.05 * one


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["T2", "S2", "T2xS2", "K2"])
def test_bfloat16_is_no_farther_from_float32_than_with_one_worker(folders: dict[str, Path], layout: str) -> None:
    prompts, _ = asked(60)
    exact = likely(folders["llama"], prompts, dtype="float32")
    alone, split = (likely(folders["llama"], prompts, dtype="bfloat16", **options) for options in ({}, LAYOUTS[layout]))
    check_no_farther(exact, alone, split)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["smollm2", "smollm2:bf16"])
def test_the_default_model_is_no_farther_from_float32_than_with_one_worker(model: str) -> None:
    """In its compiled forward pass. What rounds as much as this says other tokens after some dozens."""
    text = Path("README.md").read_text()
    prompts = [text[700 * number : 700 * number + 600] for number in range(4)]
    exact = likely("smollm2:bf16", prompts, dtype="float32")
    alone, split = (likely(model, prompts, **options) for options in ({}, LAYOUTS["T2"]))
    check_no_farther(exact, alone, split)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", ["T2xS2", "K2"])
def test_twenty_thousand_tokens_are_executed_again(folders: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """In the recorded layout, in bfloat16, in blocks that the compiled forward pass takes."""
    options = {**LAYOUTS[layout], "block_size": 16, "num_blocks": LAYOUTS[layout].get("num_blocks", 36) // 2}
    model, num_tokens, num_runs = folders["llama"], 0, 0
    while num_tokens < 20_000:
        num_runs += 1
        folder = tmp_path / f"{num_runs}"
        run = serve(model, "", folder, 400, seed=num_runs, dtype="bfloat16", **options)
        result = execute(run.folder, model=str(model))
        assert (result.exit_code, result.mismatches, result.host_differences) == (0, [], [])
        num_tokens += result.num_tokens
    print(f"{layout}: {num_tokens:,} tokens")


def are_gone(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_deaths_of_any_rank_change_no_token(
    folders: dict[str, Path], alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or stopped, while it computes, waits for others or loads its weights."""
    name, num_deaths, rng = "three key heads, tied", 20, random.Random(5)
    monkeypatch.setattr(controller, "RESTART_SECONDS", 0)
    struck: list[tuple[int, int]] = []
    ended = threading.Event()

    def strike(llm: LLM) -> None:
        engine = llm._composition.engine
        while not ended.is_set() and len(struck) < num_deaths:
            while not engine.has_worker and rng.random() < 0.9 and not ended.wait(0.5):
                pass
            ended.wait(rng.random() * 2)
            [pids] = engine.rank_pids
            if len(pids) == 4 and not ended.is_set():
                # One that stops while it loads is missed late, as it may only be slow.
                number = rng.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP]) if engine.has_worker else signal.SIGKILL
                rank = rng.randrange(4)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], number)
                    struck.append((rank, number))
                wait_until(functools.partial(are_gone, pids))

    expected = alone(name, 200).outputs
    prompts, params = asked(200)
    patience: dict[str, Any] = {"heartbeat_timeout_seconds": 4, "max_losses": 0, "max_restarts": 10 * num_deaths}
    with LLM(folders[name], record=tmp_path, **SIZES, **LAYOUTS["T2xS2"], **patience) as llm:
        striking = threading.Thread(target=strike, args=(llm,))
        striking.start()
        try:
            while len(struck) < num_deaths:
                assert_alike(llm.generate(prompts, params, use_tqdm=False), expected)
        finally:
            ended.set()
            striking.join()
    trace = verified(tmp_path / "latest" / "trace.jsonl", check_invariants=False)
    reasons = {signal.SIGKILL: "died (killed by SIGKILL)", signal.SIGSTOP: "no heartbeat for 4 s"}
    lost = [(each.rank, each.reason) for each in trace.of(WorkerLost)]
    print(f"{len(struck)} deaths, {len(lost)} of them in service")
    expected_losses = iter((rank, reasons[signal.Signals(number)]) for rank, number in struck)
    # The others died while they started, which is no loss.
    assert all(each in expected_losses for each in lost), (lost, struck)
    assert len(lost) > num_deaths // 4
