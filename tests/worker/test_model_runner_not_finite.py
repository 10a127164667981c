"""Checkpoints that compute NaN for some sequences: those end with an error, the others are not disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.kernels.cpu import native
from eventlm.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.worker.launches import new_sequence
from tests.worker.reference import Schedule, make_runner

#: The embedding of this token is broken, and so is every sequence that contains it.
BROKEN_ID = 77
CLEAN = list(range(10, 29))
BROKEN = [*CLEAN[:6], BROKEN_ID, *CLEAN[7:]]
FORWARDS = ["torch", *native.available_builds()]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.2},
    {"temperature": 0.8, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 20, "eos_token_ids": (2,)},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN_ID, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("way", WAYS)
def test_only_the_broken_sequences_end(
    checkpoint: Path, forward: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **way})
    runner = make_runner(checkpoint, dtype="bfloat16", block_size=16, num_blocks=8, cpu_kernels=forward)

    def serve(*prompts: list[int]) -> Schedule:
        """Each in two blocks, three decodes for those that are not over, the last with a step in flight."""
        schedule = Schedule(runner, monkeypatch)
        schedule.step(
            new=[new_sequence(number, prompt, params=params) for number, prompt in enumerate(prompts)],
            chunks=[(number, 0, 0, len(prompt), 1) for number, prompt in enumerate(prompts)],
            blocks=[(number, 0, [2 * number, 2 * number + 1]) for number in range(len(prompts))],
        )
        going_on = {key: prompts[key[0]] for key in schedule.outputs}
        schedule.decode(going_on, 2)
        schedule.decode(going_on, 1, in_flight=1)
        schedule.forget_all()
        monkeypatch.undo()
        return schedule

    alone = serve(CLEAN, CLEAN[::-1])
    assert len(alone.outputs[0, 0]) == 4
    mixed = serve(BROKEN, CLEAN[::-1], BROKEN[::-1])
    assert mixed.ends == {(0, 0): ["error"], (2, 0): ["error"]}
    assert mixed.outputs == {(1, 0): alone.outputs[1, 0]}
    # In the blocks that the broken one has left.
    again = serve(CLEAN, CLEAN[::-1])
    assert (again.outputs, again.ends) == (alone.outputs, {})
