"""Ranks that differ in what tokens depend on do not start, and one line says in what."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.core.predictor import StepShape
from eventlm.engine.replicas.rank_agreement import agreed
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import CheckpointError, EventLMError
from eventlm.worker.protocol import StepSample, WorkerReady


def report(**changes: Any) -> WorkerReady:
    host = {"isa": "AVX512", "device": "cpu", "threads": 2}
    fields: dict[str, Any] = {"pid": 1, "version": "1.0", "num_blocks": 50, "model_fingerprint": "f00d", "host": host}
    return WorkerReady(epoch=1, **fields | changes)


def test_the_report_of_all() -> None:
    reports = [report(pid=rank, num_blocks=50 - rank, notes=["slow", f"rank {rank}"]) for rank in range(3)]
    found = agreed(reports, ["", "", ""], 1)
    assert (found.pid, found.num_blocks, found.notes) == (1, 48, ["slow", "rank 0", "rank 1", "rank 2"])


def test_a_step_takes_as_long_as_the_slowest_rank_does() -> None:
    shapes = [StepShape(num_decodes=1), StepShape(num_decodes=8)]

    def measured(*times_ns: int) -> list[StepSample]:
        return [StepSample(shape=shape, duration_ns=each) for shape, each in zip(shapes, times_ns, strict=True)]

    reports = [report(samples=measured(5, 9)), report(samples=measured(7, 8))]
    assert agreed(reports, ["", ""], 1).samples == measured(7, 9)


def test_what_tokens_do_not_depend_on_may_differ() -> None:
    other = report(host={"isa": "AVX512", "device": "cuda:1", "threads": 4, "weight_bytes": 7})
    assert agreed([report(), other], ["", ""], 0) == report()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"version": "1.1"},
            EngineUnavailableError,
            "version of eventlm, but rank 0 on a has 1.0 and rank 2 on c has 1.1",
        ),
        (
            {"model_fingerprint": "beef"},
            CheckpointError,
            "checkpoint, by its fingerprint, but rank 0 on a has f00d and rank 2 on c has beef",
        ),
        ({"host": {"isa": "AVX2"}}, EngineUnavailableError, "isa, but rank 0 on a has AVX512 and rank 2 on c has AVX2"),
        ({"host": {}}, EngineUnavailableError, "isa, but rank 0 on a has AVX512 and rank 2 on c has none"),
    ],
)
def test_a_difference_is_one_line(changes: dict[str, Any], error: type[EventLMError], said: str) -> None:
    with pytest.raises(error) as caught:
        agreed([report(), report(), report(**changes)], ["a", "b", "c"], 2)
    assert str(caught.value) == f"the ranks of a replica must have the same {said}"
