"""The runner for GPUs against transformers, and against the runner for CPUs, with steps under way."""

from __future__ import annotations

import random
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from eventlm.sampling_params import SamplingParams
from eventlm.types import RequestKind
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.gpu.step import GpuStep
from eventlm.worker.warm_up import warm_kernels, warm_up
from tests.checkpoints import EOS_ID, VOCAB_SIZE, make_checkpoint
from tests.worker.gpu.driven import Asked, Driven, Sample, gpu_runner, small_checkpoint
from tests.worker.reference import make_runner
from tests.worker.test_model_runner_not_finite import BROKEN_ID, break_token

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama-bias": {"bias": True, "head_dim": 32},
    "qwen3-tied": {"family": "qwen3", "tied": True, "num_kv_heads": 1, "head_dim": 32, "rope": "llama3"},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **MODELS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def runner(plain: Path) -> GpuRunner:
    return gpu_runner(plain)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(5, VOCAB_SIZE) for _ in range(length)]


def greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    # Longer than a step takes, so in chunks; one decodes beside the chunks of the other.
    asked = [Asked(prompt_of(5), 7, GREEDY), Asked(prompt_of(35), 2, GREEDY), Asked(prompt_of(9), 4, GREEDY)]
    driven = Driven(gpu_runner(folder, max_num_batched_tokens=16), asked)
    for number, (prompt, num_tokens, *_) in enumerate(asked):
        assert driven.outputs[number] == greedy(folder, prompt, num_tokens)
    assert {launch.bucket for launch in driven.launches} >= {0, 1}
    assert max(in_flight for launch in driven.launches for *_, in_flight in launch.decodes) == 1


PARAMS = {
    "seeded": SamplingParams(temperature=1.0, seed=1, ignore_eos=True),
    "masked": SamplingParams(temperature=0.9, seed=2, top_k=20, top_p=0.8, min_p=0.01, ignore_eos=True),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, ignore_eos=True),
    "bad words": SamplingParams(temperature=0.5, seed=3, bad_words_token_ids=((7, 9), (11,)), ignore_eos=True),
    "biased": SamplingParams(temperature=0.0, logit_bias={30: 2.5, 40: -90.0}, min_tokens=3),
}


def test_draws_are_those_of_the_runner_for_cpus(plain: Path, runner: GpuRunner) -> None:
    asked = [Asked(prompt_of(3 + 2 * number), 5, params) for number, params in enumerate(PARAMS.values())]
    settings = {"block_size": 16, "num_blocks": 32, "max_model_len": 128, "max_num_batched_tokens": 64}
    expected = Driven(make_runner(plain, max_num_seqs=8, **settings), asked)
    assert Driven(runner, asked).outputs == expected.outputs


def test_a_sequence_that_ends_unforeseen_wastes_one_row_and_nothing_else(plain: Path, runner: GpuRunner) -> None:
    prompt = prompt_of(9)
    output = greedy(plain, prompt, 6)
    ending = SamplingParams(temperature=0.0, stop_token_ids=(output[2],))
    driven = Driven(runner, [Asked(prompt, 6, ending), Asked(prompt_of(12), 8, GREEDY)])
    first = output.index(output[2])
    # The step behind the end was under way: it computed a token that nobody wanted.
    assert driven.outputs[0] == output[: first + 2]
    assert driven.outputs[1] == greedy(plain, prompt_of(12), 8)


def test_preempted_sequences_go_on_with_what_they_had(plain: Path) -> None:
    # Eight blocks for three sequences that come to need four, four and three.
    asked = [Asked(prompt_of(5), 9, GREEDY), Asked(prompt_of(6), 9, GREEDY), Asked(prompt_of(4), 6, GREEDY)]
    driven = Driven(gpu_runner(plain, block_size=4, num_blocks=8, max_model_len=28), asked)
    for number, (prompt, num_tokens, *_) in enumerate(asked):
        assert driven.outputs[number][:num_tokens] == greedy(plain, prompt, num_tokens)
    assert driven.rig.preempted()


def test_each_micro_batch_holds_as_many_sequences_as_a_step_has_rows(plain: Path) -> None:
    asked = [Asked(prompt_of(2 + number), 3, GREEDY) for number in range(3)]
    runner = gpu_runner(plain, max_num_seqs=1, decode_batches=3, max_steps_in_flight=3)
    # One more than there would be room for, did a worker hold only the sequences of one step and those that end.
    driven = Driven(runner, asked, num_stages=2, micro_batches=3)
    assert driven.outputs == {number: greedy(plain, prompt, 3) for number, (prompt, *_) in enumerate(asked)}


def test_logprobs_come_with_the_tokens(plain: Path, runner: GpuRunner) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    asked = [Asked(prompt_of(7), 3, params), Asked(prompt_of(9), 3, GREEDY)]
    driven = Driven(runner, asked)
    settings = {"block_size": 16, "num_blocks": 32, "max_model_len": 128, "max_num_batched_tokens": 64}
    expected = Driven(make_runner(plain, max_num_seqs=8, **settings), asked)
    assert driven.outputs == expected.outputs
    assert len(driven.extras[Sample(0, 0)]) == len(expected.extras[Sample(0, 0)])
    for found, other in zip(driven.extras[Sample(0, 0)], expected.extras[Sample(0, 0)], strict=True):
        assert found.logprobs is not None
        assert other.logprobs is not None
        assert found.logprobs.top_ids == other.logprobs.top_ids
        assert found.logprobs.logprobs == pytest.approx(other.logprobs.logprobs, abs=1e-4)


def test_only_the_broken_sequences_end(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> None:
    """However they draw, with a step in flight behind the one that ends them."""
    folder = break_token(shutil.copytree(plain, tmp_path_factory.mktemp("broken"), dirs_exist_ok=True))
    runner = gpu_runner(folder)
    clean = [Asked(prompt_of(9), 3, params) for params in PARAMS.values()]
    broken = [Asked([7, BROKEN_ID, 8, 9], 3, params) for params in PARAMS.values()]
    alone = Driven(runner, clean)
    mixed = Driven(runner, [*broken, *clean])
    for number in range(len(clean)):
        assert mixed.reasons[Sample(number, 0)] == ("error", 0)
        assert mixed.outputs[len(broken) + number] == alone.outputs[number]
    # In the blocks that the broken ones have left.
    assert Driven(runner, clean).outputs == alone.outputs


def test_extras_of_broken_sequences_are_errors(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> None:
    folder = break_token(shutil.copytree(plain, tmp_path_factory.mktemp("broken"), dirs_exist_ok=True))
    clean, broken = prompt_of(20), [*prompt_of(12), BROKEN_ID, *prompt_of(7)]
    asks: list[tuple[RequestKind, SamplingParams]] = [
        ("pool", GREEDY),
        ("pool", SamplingParams(pooling="mean")),
        ("score", GREEDY),
        ("generate", SamplingParams(temperature=0.0, prompt_logprobs=1, ignore_eos=True)),
        ("generate", SamplingParams(temperature=0.0, logprobs=1, allowed_token_ids=(40, 41))),
    ]
    asked = [
        Asked(prompt, 2 * (kind == "generate"), params, kind=kind)
        for kind, params in asks
        for prompt in (clean, broken)
    ]
    # Prompts in chunks.
    driven = Driven(gpu_runner(folder, max_num_batched_tokens=16), asked)
    for number, each in enumerate(asked):
        reason, _ = driven.reasons[Sample(number, 0)]
        assert (reason == "error") is (each.prompt is broken), each
        assert bool(driven.extras.get(Sample(number, 0))) or each.prompt is broken


def test_operations_are_timed_if_asked(plain: Path) -> None:
    runner = gpu_runner(plain, profile_ops=True)
    driven = Driven(runner, [Asked(prompt_of(5), 3, GREEDY)])
    assert driven.outputs[0] == greedy(plain, prompt_of(5), 3)


def test_the_end_of_sequence_token_ends(plain: Path, runner: GpuRunner) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(EOS_ID,), eos_token_ids=(EOS_ID,))
    driven = Driven(runner, [Asked(prompt_of(5), 9, params)])
    assert driven.outputs[0][0] == EOS_ID
    assert len(driven.outputs[0]) <= 2


def test_kernels_are_warmed_by_steps_that_leave_nothing_behind(plain: Path) -> None:
    runner = gpu_runner(plain, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=32)
    told: list[tuple[int, int]] = []
    warm_kernels(runner, lambda *counts: told.append(counts))
    assert told == [(number, 9) for number in range(1, 10)]
    driven = Driven(runner, [Asked(prompt_of(5), 3, GREEDY)])
    assert driven.outputs[0] == greedy(plain, prompt_of(5), 3)


def test_a_warm_up_measures_steps_and_leaves_nothing_behind(plain: Path) -> None:
    runner = gpu_runner(plain, max_num_seqs=2, max_num_batched_tokens=16)
    assert len(warm_up(runner)) >= 2
    driven = Driven(runner, [Asked(prompt_of(5), 3, GREEDY)])
    assert driven.outputs[0] == greedy(plain, prompt_of(5), 3)


def test_a_warm_up_keeps_to_the_blocks_that_were_found(plain: Path) -> None:
    runner = gpu_runner(plain, num_blocks=2, max_num_seqs=2, max_num_batched_tokens=16)
    # As on a GPU whose memory was profiled.
    runner.setup = structs.replace(runner.setup, num_blocks=0)
    assert [(each.shape.prefill_tokens, each.shape.num_decodes) for each in warm_up(runner)] == [(16, 0)]


def test_a_step_is_launched_without_waiting_for_the_device(
    plain: Path, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a step that is launched reads what the device has")

    start, settle = runner.start, GpuStep.settle

    def launch(*arguments: Any) -> GpuStep:
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
                patch.setattr(torch.Tensor, name, refuse)
            patch.setattr(GpuStep, "settle", refuse)
            return start(*arguments)

    monkeypatch.setattr(runner, "start", launch)
    asked = [
        Asked(prompt_of(6 + number), 4, PARAMS[name]) for number, name in enumerate(("seeded", "masked", "biased"))
    ]
    Driven(runner, asked)
    assert GpuStep.settle is settle


def test_compiled_parts_give_the_same_tokens_and_their_gain_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More layers than torch would compile one by one.
    folder = make_checkpoint(tmp_path, num_heads=2, num_kv_heads=1, num_layers=10)
    graphs = []

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(module)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    runner = gpu_runner(folder, torch_compile=True, max_num_seqs=2)
    driven = Driven(runner, [Asked(prompt_of(5), 3, GREEDY)])
    assert driven.outputs[0] == greedy(folder, prompt_of(5), 3)
    # The last layer is followed by no norm; a batch of one is a kind of its own.
    assert len(graphs) <= 4
    assert re.fullmatch(
        r"torch.compile took [\d.]+ s; a step of 2 decodes takes [\d.]+ ms with it and [\d.]+ ms without",
        runner.notes[0],
    )
