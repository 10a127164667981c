"""Recorded runs are repeated by the simulator, whatever went wrong in them; a change in them is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.workload.recorded_run import read_run
from eventlm.system.system import real_system
from tests.simulation import Simulation

#: Every policy, batcher and router comes up in so many consecutive seeds.
NUM_WORKLOADS = 48


def record(folder: Path, seed: int, *, segment_bytes: int = 0) -> Path:
    """A random workload with all that may go wrong."""
    with LogWriter(real_system(), folder, f"seed-{seed}", segment_bytes=segment_bytes) as writer:
        Simulation(seed, writer=writer, check_every=0).run()
        return writer.run_folder


def is_speculative(path: Path) -> bool:
    """Whether rows may produce several tokens."""
    with LogReader(path) as log:
        return log.header.core.max_tokens_per_row > 1


def test_random_workloads_are_repeated(tmp_path: Path) -> None:
    num_repeated = num_decisions = 0
    for seed in range(NUM_WORKLOADS):
        path = record(tmp_path, seed, segment_bytes=8192 if seed % 5 == 0 else 0)
        if is_speculative(path):
            continue
        run = read_run(path)
        result = null_test(run, path)
        assert result.difference == "", f"workload {seed}: {result.difference}"
        num_repeated += 1
        num_decisions += result.num_decisions
    assert num_repeated > NUM_WORKLOADS // 3
    assert num_decisions > 10_000


def test_another_length_is_found(tmp_path: Path) -> None:
    path = record(tmp_path, 2)
    run = read_run(path)
    index = next(i for i, request in enumerate(run.workload.requests) if request.outputs[0].reason == "length")
    request = run.workload.requests[index]
    shorter = structs.replace(request.outputs[0], worker_end=request.outputs[0].num_tokens - 1)
    run.workload.requests[index] = structs.replace(request, outputs=[shorter, *request.outputs[1:]])
    result = null_test(run, path)
    assert result.difference.startswith("event ")


def test_another_duration_is_found(tmp_path: Path) -> None:
    path = record(tmp_path, 2)
    run = read_run(path)
    step = run.steps[len(run.steps) // 2]
    run.steps[len(run.steps) // 2] = step._replace(completed_ns=step.completed_ns + 1)
    assert null_test(run, path).difference.startswith("event ")


def test_a_torn_run_is_repeated_as_far_as_it_goes(tmp_path: Path) -> None:
    path = record(tmp_path, 2) / "trace.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(index for index, line in enumerate(lines) if index > len(lines) // 2 and b'"t":"launch"' in line)
    path.write_bytes(b"".join(lines[:cut]))
    run = read_run(path)
    assert run.num_unfinished > 0
    assert null_test(run, path).difference == ""


def test_speculation_is_refused(tmp_path: Path) -> None:
    path = next(path for path in (record(tmp_path, seed) for seed in range(20)) if is_speculative(path))
    with pytest.raises(UsageError, match="speculation"):
        read_run(path)
