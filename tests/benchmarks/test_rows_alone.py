"""Rows in steps of their own give the tokens of the whole step, if batches do not matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rows_alone import RowsAlone
from eventlm.events import Header
from eventlm.replay.execute.execution import execute
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup
from tests.replay.executions import FakeWorkers, record_with_tokens


@pytest.mark.parametrize("teacher_force", [False, True])
def test_random_workloads_give_the_same_tokens(*, teacher_force: bool, tmp_path: Path) -> None:
    num_more = 0
    for seed in range(1, 7):
        run = record_with_tokens(tmp_path, seed)
        workers: list[FakeWorkers] = []

        def make(setup: WorkerSetup, header: Header, workers: list[FakeWorkers] = workers) -> RowsAlone:
            workers.append(FakeWorkers(setup, header))
            return RowsAlone(workers[0])

        result = execute(run, model=FAKE_MODEL, teacher_force=teacher_force, make_workers=make)
        assert (result.exit_code, result.mismatches) == (0, [])
        assert len(workers[0].steps) >= result.num_steps > 0
        num_more += len(workers[0].steps) - result.num_steps
    assert num_more > 100
