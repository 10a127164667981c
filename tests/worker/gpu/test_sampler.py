"""What is drawn on a GPU is what is drawn without one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from eventlm.worker.gpu.sampler import GpuSampler
from eventlm.worker.sampling.sampler import NOT_FINITE
from eventlm.worker.sampling.vocabulary_masks import Masks
from eventlm.worker.sequence_table import WorkerSequence
from tests.worker.draws import make_sampler, random_logits, sequence
from tests.worker.sampling.test_sampler import MIXED

#: The GPU, or the CPU, where kernels are interpreted.
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


def gpu_sampler(vocab_size: int, sequences: list[WorkerSequence]) -> GpuSampler:
    sampler = GpuSampler(vocab_size, DEVICE)
    for each in sequences:
        sampler.table.add(each)
    return sampler


def gpu_draw(
    sampler: GpuSampler, logits: torch.Tensor, sequences: list[WorkerSequence], masks: Masks | None = None
) -> list[int]:
    staged = sampler.stage(sequences)
    draws = torch.from_numpy(staged.draws).to(DEVICE)
    tokens: list[int] = sampler.draw(logits.to(DEVICE), staged.rows, draws, masks=masks).tolist()
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_draw_step_after_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.worker.gpu.sampler.SLICE_ENTRIES", 3 * 3000)
    sequences = [sequence(number, **fields) for number, fields in enumerate(MIXED)]
    on_gpu, on_cpu = gpu_sampler(3000, sequences), make_sampler(3000, sequences)
    # The second one depends on what the first has drawn, whatever the dtype.
    for step in range(2 if dtype == torch.float32 else 1):
        logits = random_logits(len(MIXED), 3000, seed=step).to(dtype)
        before = logits.clone()
        expected = on_cpu.sample(logits, sequences)
        assert gpu_draw(on_gpu, logits, sequences) == expected.tolist()
        assert torch.equal(logits, before)
        on_gpu.record(sequences, expected)
        for each, token in zip(sequences, expected.tolist(), strict=True):
            each.token_ids.append(token)


@pytest.mark.parametrize(("value", "place"), [(math.nan, "all"), (-math.nan, "one"), (math.inf, "one")])
def test_rows_with_nan_or_infinity_draw_no_token(value: float, place: str) -> None:
    """As on CPUs, however they draw; their neighbours draw what they always do."""
    vocab_size = 3000
    logits = random_logits(2 * len(MIXED), vocab_size)
    sequences = [sequence(number, **fields) for number, fields in enumerate([*MIXED, *MIXED])]
    expected = make_sampler(vocab_size, sequences).sample(logits, sequences)
    logits[::2, slice(None) if place == "all" else 11] = value
    expected[::2] = make_sampler(vocab_size, sequences).sample(logits, sequences)[::2]
    assert (expected == NOT_FINITE).sum() > len(MIXED) // 2
    assert gpu_draw(gpu_sampler(vocab_size, sequences), logits, sequences) == expected.tolist()


def test_grammars() -> None:
    sequences = [sequence(1, grammar="start: /a/", seed=1), sequence(2, seed=2)]
    bits = np.zeros((1, 50), dtype=bool)
    bits[0, [7, 33]] = True
    masks = Masks(np.array([0]), np.packbits(bits, axis=-1, bitorder="little"))
    logits = random_logits(2, 50)
    expected = make_sampler(50, sequences).sample(logits, sequences, masks=masks).tolist()
    assert gpu_draw(gpu_sampler(50, sequences), logits, sequences, masks) == expected
    assert expected[0] in (7, 33)


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({}, False),
        ({"top_p": 0.5, "temperature": 0.5}, False),
        ({"min_tokens": 5, "eos_token_ids": (3,)}, False),
        ({"bad_words_token_ids": ((9,),), "logit_bias": {1: 1.0}}, False),
        ({"allowed_token_ids": (1, 2)}, False),
        ({"bad_words_token_ids": ((9, 8),)}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"grammar": "start: /a/"}, True),
    ],
)
def test_who_cannot_be_drawn_for_before_its_tokens_are_known(params: dict[str, Any], needs: bool) -> None:
    plain, other = sequence(1), sequence(2, **params)
    sampler = gpu_sampler(50, [plain, other])
    assert sampler.needs_history([plain, other]) is needs
    assert not sampler.needs_history([plain])
    sampler.table.remove(other.id)
    assert not sampler.needs_history([plain, other])


def test_what_is_staged_depends_on_the_place_and_not_on_the_tokens() -> None:
    one, other = sequence(1, seed=3, output=[5, 6]), sequence(1, seed=3, output=[7, 8])
    staged = gpu_sampler(50, [one]).stage([one]).draws
    assert np.array_equal(staged, gpu_sampler(50, [other]).stage([other]).draws)
    other.token_ids.append(1)
    assert not np.array_equal(staged, gpu_sampler(50, [other]).stage([other]).draws)


def test_nothing_is_copied_from_the_host_where_no_logits_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [sequence(1), sequence(2, temperature=0.0), sequence(3, top_p=0.5)]
    sampler = gpu_sampler(50, sequences)
    staged, logits = sampler.stage(sequences), random_logits(3, 50).to(DEVICE)
    draws = torch.from_numpy(staged.draws).to(DEVICE)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a tensor was made of what the host has")

    for name in ("from_numpy", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, refuse)
    sampler.draw(logits, staged.rows, draws)


class Copies(TorchDispatchMode):
    """Notes the copies to another device that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies, self.waiting = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self.num_copies += 1
            self.waiting += not kwargs.get("non_blocking")
        return func(*args, **kwargs)


def test_logits_are_changed_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1, 2)},
        {"bad_words_token_ids": ((9,),)},
        {"presence_penalty": 0.1},
        {"grammar": "start: /a/"},
        {},
    ]
    sequences = [sequence(number, **params) for number, params in enumerate(changes)]
    sampler = gpu_sampler(50, sequences)
    staged = sampler.stage(sequences)
    # Nothing can be read back from this device, so whatever waits for a result fails.
    nowhere = torch.device("meta")
    sampler._device = nowhere
    monkeypatch.setattr("eventlm.worker.gpu.sampler.apply_penalties", lambda *arguments: None)
    monkeypatch.setattr("eventlm.worker.gpu.sampler.draw_tokens", lambda *arguments: None)
    masks = Masks(np.array([4]), np.full((1, 7), 255, dtype=np.uint8))
    with Copies() as copies:
        sampler.draw(torch.empty(6, 50, device=nowhere), staged.rows, torch.empty(6, 6, device=nowhere), masks=masks)
    assert copies.num_copies > 5
    assert copies.waiting == 0


def test_no_rows() -> None:
    assert gpu_draw(gpu_sampler(50, []), torch.empty(0, 50), []) == []
