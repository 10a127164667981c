"""States of real runners: sequences that start from zero, from copies, and go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.models.config import read_model, state_bytes
from eventlm.worker.state_cache import StateCache
from tests.models.families.proof import SMALL, VOCAB_SIZE, make_checkpoint
from tests.models.families.test_lfm2 import CASES as LFM2
from tests.models.families.test_qwen_next import CASES as QWEN_NEXT
from tests.worker.launches import new_sequence
from tests.worker.reference import Key, Schedule, make_runner

MODELS: dict[str, dict[str, Any]] = {"convolutions": LFM2["lfm2"], "delta rule": QWEN_NEXT["qwen 3.5"]}
_RNG = random.Random(1)
LONG = [_RNG.randrange(3, VOCAB_SIZE) for _ in range(90)]
#: Shares two blocks with it, and one.
OTHER = LONG[:32] + [_RNG.randrange(3, VOCAB_SIZE) for _ in range(9)]
THIRD = LONG[:16] + [_RNG.randrange(3, VOCAB_SIZE) for _ in range(30)]
PROMPTS: dict[Key, list[int]] = {(0, 0): LONG, (1, 0): OTHER, (2, 0): THIRD}
NUM_DECODES = 5


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, **SMALL | MODELS[request.param])
    return folder


def schedule_of(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    dtype = "float32" if path == "torch" else "bfloat16"
    runner = make_runner(folder, dtype=dtype, block_size=16, max_model_len=256, cpu_kernels=path, state_slots=8)
    runner._forward.states.memory.fill_(torch.nan)
    return Schedule(runner, monkeypatch)


def alone(folder: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Each prompt whole, from zero, then decodes of each."""
    schedule = schedule_of(folder, path, monkeypatch)
    for number, (key, prompt) in enumerate(PROMPTS.items()):
        schedule.step(
            new=[new_sequence(key[0], prompt)],
            chunks=[(*key, 0, len(prompt), 1)],
            blocks=[(0, 0, list(range(10 * number, 10 * number + 8)))],
            states=[(0, number, -1, [])],
        )
        schedule.decode({key: prompt}, NUM_DECODES)
    return schedule


def check(found: Schedule, expected: Schedule, path: str) -> None:
    """The same tokens, and logits, of which vector builds have the very bits."""
    assert found.outputs == expected.outputs
    for key, logits in expected.logits.items():
        ours, theirs = torch.stack(found.logits[key]), torch.stack(logits)
        if path in ("torch", "amx"):
            # Tiles round sums otherwise than vectors, which bfloat16 may show.
            bound = 1e-2 if path == "amx" else 1e-5
            assert torch.allclose(ours, theirs, rtol=0, atol=bound * float(theirs.abs().max())), key
        else:
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("path", ["torch", *native.available_builds()])
def test_the_cut_of_a_prompt_and_copies_change_nothing(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        expected = alone(folder, path, patch)
    schedule = schedule_of(folder, path, monkeypatch)
    # The first in chunks, one of them from a copy. The second starts from a copy that the row before it keeps.
    schedule.step(
        new=[new_sequence(0, LONG)],
        chunks=[(0, 0, 0, 1, 0)],
        blocks=[(0, 0, list(range(8)))],
        states=[(0, 0, -1, [])],
    )
    schedule.step(chunks=[(0, 0, 1, 19, 0)], states=[(0, 0, 0, [(16, 4), (20, 5)])])
    schedule.step(
        new=[new_sequence(1, OTHER)],
        chunks=[(0, 0, 20, 65, 0), (1, 0, 32, 9, 1)],
        blocks=[(1, 0, [0, 1, 10])],
        states=[(0, 0, 5, [(32, 6), (48, 7)]), (1, 1, 6, [])],
    )
    # The third starts from the copy at its first block, which then is another's. A decode runs beside it.
    decode = (1, 0, len(OTHER) + 1, 0)
    schedule.step(
        new=[new_sequence(2, THIRD)],
        decodes=[decode],
        chunks=[(0, 0, 85, 5, 1), (2, 0, 16, 30, 1)],
        blocks=[(2, 0, [0, 11, 12, 13])],
        states=[(1, 0, 0, [(88, 5)]), (2, 2, 4, [(32, 4)])],
    )
    for _ in range(NUM_DECODES):
        late = [key for key, got in schedule.outputs.items() if len(got) <= NUM_DECODES]
        schedule.step(decodes=[(*key, len(PROMPTS[key]) + len(schedule.outputs[key]), 0) for key in late])
    check(schedule, expected, path)


def test_size_and_errors(folder: Path) -> None:
    model = read_model(folder)
    cache = StateCache(model, 3)
    assert cache.memory.shape == (3, model.state_size)
    assert cache.memory.nbytes == 3 * state_bytes(model)
    with pytest.raises(UsageError, match="keeps states of sequences; give --state-slots"):
        StateCache(model, 0)
