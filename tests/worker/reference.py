"""Runs schedules on a ModelRunner and compares what it computed with transformers on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import NewSequence, RowExtras, WorkerSetup
from tests.worker.launches import launched, payload

Key = tuple[int, int]


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    """A runner with blocks of 4 tokens, in float32 unless told otherwise."""
    fields: dict[str, Any] = {
        "replica": 0,
        "epoch": 1,
        "model": str(folder),
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 256,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "threads": 1,
    }
    return ModelRunner(WorkerSetup(**{**fields, **changes}))


class Pair(NamedTuple):
    """A checkpoint in transformers and in a runner."""

    model: Any
    runner: ModelRunner


def make_pair(folder: Path) -> Pair:
    """Both of them in float32."""
    # It takes seconds to load, and most tests of workers need none of it.
    from transformers import AutoModelForCausalLM

    return Pair(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), make_runner(folder))


class Schedule:
    """Steps of a runner, with the tokens and the logits that each sequence got."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = runner
        self.outputs: dict[Key, list[int]] = {}
        self.logits: dict[Key, list[torch.Tensor]] = {}
        self.ends: dict[Key, list[str]] = {}
        self._held: dict[Key, None] = {}
        self._step = 0
        self._captured: list[torch.Tensor] = []
        self.extras: dict[Key, list[RowExtras]] = {}
        sample, draw_next = runner._sampler.sample, runner._sampler.draw_next

        def capture(logits: torch.Tensor, sequences: Any, **options: Any) -> Any:
            self._captured = list(logits.clone())
            return sample(logits, sequences, **options)

        def capture_next(hidden: torch.Tensor, sequences: Any) -> Any:
            # Where tokens are drawn without logits, those that there would be.
            drawn = draw_next(hidden, sequences)
            self._captured = list(runner._forward.logits(hidden)) if drawn is not None else []
            return drawn

        monkeypatch.setattr(runner._sampler, "sample", capture)
        monkeypatch.setattr(runner._sampler, "draw_next", capture_next)

    def step(
        self,
        *,
        new: list[NewSequence] | None = None,
        decodes: list[tuple[int, int, int, int]] | None = None,
        chunks: list[tuple[int, int, int, int, int]] | None = None,
        blocks: list[tuple[int, int, list[int]]] | None = None,
        forget: list[Key] | None = None,
        states: list[tuple[int, int, int, list[tuple[int, int]]]] | None = None,
    ) -> None:
        """Execute one launch and keep what it produced."""
        launch = launched(self._step, decodes=decodes, chunks=chunks, blocks=blocks, forget=forget, states=states)
        self._step += 1
        tokens, ends, extras, *_ = self.runner.execute(launch, payload(*(new or [])))
        keys = [row[:2] for row in launch.decodes] + [row[:2] for row in launch.chunks]
        self._held |= dict.fromkeys(keys)
        for key in launch.forget:
            if key not in keys:
                self._held.pop(key, None)
        for number, reason in ends:
            self.ends.setdefault(keys[number], []).append(reason)
        for beside in extras:
            self.extras.setdefault(keys[beside.row], []).append(beside)
        captured = iter(self._captured)
        for key, produced in zip(keys, tokens, strict=True):
            if produced:
                self.outputs.setdefault(key, []).extend(produced)
                self.logits.setdefault(key, []).append(next(captured))

    def decode(self, prompts: dict[Key, list[int]], num_steps: int, *, in_flight: int = 0) -> None:
        """Decode these sequences; the engine has not seen the tokens of their last `in_flight` steps."""
        for _ in range(num_steps):
            rows = [
                (*key, len(prompt) + len(self.outputs[key]) - in_flight, in_flight) for key, prompt in prompts.items()
            ]
            self.step(decodes=rows)

    def forget_all(self) -> None:
        """Leave the runner empty for the next test."""
        self.step(forget=list(self._held))
        self._held.clear()

    def check(self, model: Any, prompts: dict[Key, list[int]], *, tolerance: float = 1e-4) -> None:
        """Every sequence's tokens are transformers' greedy ones, and its logits are within `tolerance`."""
        for key, prompt in prompts.items():
            output = self.outputs[key]
            with torch.inference_mode():
                expected = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
            assert output == expected.argmax(dim=-1).tolist(), key
            difference = (torch.stack(self.logits[key]) - expected).abs().max().item()
            assert difference < tolerance, (key, difference)
