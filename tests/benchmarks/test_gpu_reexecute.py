"""How much the GPU benchmark records to execute it again: as much as is wanted, or as there is time for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_harness.engines import Workload
from benchmarks.gpu_harness.row import Context
from benchmarks.gpu_sections import reexecute

SECONDS_OF_A_START = 10.0


class Machine:
    """Takes `seconds` for a round of `num_tokens`; `prompts` are what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_tokens: int, seconds: float) -> None:
        self._now = 0.0
        self._num_tokens, self._seconds = num_tokens, seconds
        self.prompts: list[list[int]] = []
        monkeypatch.setattr(reexecute, "time", SimpleNamespace(monotonic=lambda: self._now))
        monkeypatch.setattr(reexecute, "qwen", lambda context, size: Path(size))
        monkeypatch.setattr(reexecute, "start", self._start)
        monkeypatch.setattr(reexecute, "generate", self._generate)

    @contextlib.contextmanager
    def _start(self, context: Context, model: Path, **options: Any) -> Iterator[SimpleNamespace]:
        self._now += SECONDS_OF_A_START
        yield SimpleNamespace(run_folder=Path("run"))

    def _generate(self, llm: object, workload: Workload) -> SimpleNamespace:
        self._now += self._seconds
        self.prompts.append(workload.prompts[0])
        return SimpleNamespace(num_tokens=self._num_tokens, seconds=self._seconds)


@pytest.mark.parametrize(
    ("section_seconds", "num_rounds"),
    [
        # Eight are more than a million tokens.
        (1000.0, 8),
        # A start and so many rounds fit into its share twice.
        (2 * (SECONDS_OF_A_START + 3 * 5) / reexecute.SHARE, 3),
        (1.0, 1),
    ],
)
def test_a_run_is_as_long_as_can_be_executed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section_seconds: float, num_rounds: int
) -> None:
    machine = Machine(monkeypatch, num_tokens=130_000, seconds=5.0)
    context = Context(module="", smoke=False, folder=str(tmp_path), seconds=section_seconds)
    recorded = reexecute._record(context)
    assert recorded == (Path("run"), num_rounds * 130_000, num_rounds * 5.0)
    # Nothing of a round is in the prefix cache.
    assert [prompt[0] for prompt in machine.prompts] == list(range(num_rounds))
