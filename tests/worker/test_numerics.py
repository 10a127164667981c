"""Greedy tokens and logits of each way to compute a model, beside transformers' with the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from eventlm.kernels.cpu import native
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.kernels.cpu.decoders import relative_error
from tests.worker.launches import new_sequence
from tests.worker.reference import Key, Schedule, make_runner

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"bias": True, "rope": "llama3"},
    "qwen3": {"family": "qwen3", "tied": True, "head_dim": 32},
}
#: Options of a worker.
PATHS: dict[str, dict[str, Any]] = {
    "torch": {"cpu_kernels": "torch"},
    **{build: {"cpu_kernels": build} for build in native.available_builds()},
}
#: The same, and how much larger the error may be than that of transformers in bfloat16.
QUANTIZED_PATHS: dict[str, tuple[dict[str, Any], float]] = {
    f"{kernels}, {name}": ({"cpu_kernels": kernels} | options, bound)
    for kernels in ("auto", "torch")
    for name, options, bound in (
        ("int8", {"quantization": "int8"}, 4.0),
        ("KV cache int8", {"kv_cache_dtype": "int8"}, 2.0),
        ("KV cache fp8", {"kv_cache_dtype": "fp8"}, 5.0),
    )
}
#: Of transformers: the reference, and what rounding costs there.
DTYPES = (torch.float32, torch.bfloat16)
NUM_OUTPUT_TOKENS = 12
LENGTHS = (1, 15, 40, 64, 97, 130)


class Model(NamedTuple):
    """A checkpoint in bfloat16 and transformers with it, exact and in bfloat16."""

    folder: Path
    exact: Any
    rounded: Any


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16", **MODELS[request.param])
    return Model(folder, *(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for dtype in DTYPES))


class Outcome(NamedTuple):
    """Root mean square of the error of all logits, relative, and the share of tokens that are transformers' exact ones,
    of a path and of transformers in bfloat16."""

    error: float
    agreement: float
    rounded_error: float
    rounded_agreement: float


def serve(model: Model, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Outcome:
    """Prompts whole and in chunks, the first of which decode while the others come: 1 to 6 rows a step."""
    runner = make_runner(model.folder, **{"dtype": "bfloat16", "block_size": 16, "num_blocks": 64} | options)
    schedule = Schedule(runner, monkeypatch)
    rng = random.Random(3)
    prompts: dict[Key, list[int]] = {
        (number, 0): [rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for number, length in enumerate(LENGTHS)
    }
    blocks = list(range(64))
    rng.shuffle(blocks)
    for number, (key, prompt) in enumerate(prompts.items()):
        others = [
            (*other, len(prompts[other]) + len(output), 0)
            for other, output in schedule.outputs.items()
            if len(output) < NUM_OUTPUT_TOKENS
        ]
        first = min(33, len(prompt))
        rest = len(prompt) - first
        schedule.step(
            new=[new_sequence(*key[:1], prompt)],
            decodes=others,
            chunks=[(*key, 0, first, int(not rest))],
            blocks=[(len(others), 0, blocks[number * 10 : number * 10 + 10])],
        )
        if rest:
            schedule.step(chunks=[(*key, first, rest, 1)])
    while late := [key for key, output in schedule.outputs.items() if len(output) < NUM_OUTPUT_TOKENS]:
        schedule.step(decodes=[(*key, len(prompts[key]) + len(schedule.outputs[key]), 0) for key in late])
    return compare(model, prompts, schedule)


@torch.inference_mode()
def compare(model: Model, prompts: dict[Key, list[int]], schedule: Schedule) -> Outcome:
    """Of all tokens of all sequences, fed what the path gave."""
    expected, rounded, found, tokens = [], [], [], []
    for key, prompt in prompts.items():
        ids = torch.tensor([prompt + schedule.outputs[key][:-1]])
        expected.append(model.exact(ids).logits[0, len(prompt) - 1 :])
        rounded.append(model.rounded(ids).logits[0, len(prompt) - 1 :].float())
        found.append(torch.stack(schedule.logits[key]).float())
        tokens += schedule.outputs[key]
    wanted_TV, rounded_TV, found_TV = torch.cat(expected), torch.cat(rounded), torch.cat(found)
    assert len(tokens) == len(LENGTHS) * NUM_OUTPUT_TOKENS
    # Drawn greedily from what it computed itself.
    assert tokens == found_TV.argmax(dim=-1).tolist()
    wanted = wanted_TV.argmax(dim=-1)
    return Outcome(
        relative_error(found_TV, wanted_TV),
        float((torch.tensor(tokens) == wanted).float().mean()),
        relative_error(rounded_TV, wanted_TV),
        float((rounded_TV.argmax(dim=-1) == wanted).float().mean()),
    )


def test_float32_gives_transformers_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = serve(model, monkeypatch, dtype="float32")
    assert outcome.agreement == 1
    assert outcome.error < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_is_no_further_off_than_transformers(model: Model, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    outcome = serve(model, monkeypatch, **PATHS[path])
    assert outcome.error <= outcome.rounded_error
    assert outcome.agreement >= max(0.95, outcome.rounded_agreement - 0.02)


@pytest.mark.parametrize("path", QUANTIZED_PATHS)
def test_8_bits_are_as_far_off_as_they_must_be(model: Model, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    options, bound = QUANTIZED_PATHS[path]
    outcome = serve(model, monkeypatch, **options)
    assert outcome.error < bound * outcome.rounded_error
    assert outcome.agreement >= 0.8
    with monkeypatch.context() as patch:
        # Something is rounded at all.
        assert outcome.error > serve(model, patch, cpu_kernels=options["cpu_kernels"]).error
