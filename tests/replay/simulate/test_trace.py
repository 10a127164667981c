"""Simulated runs are traces: they verify, under every policy and batcher, and are the same in any process."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError
from eventlm.bus.trace_info import info
from eventlm.engine.plugins.registry import BUILT_IN
from eventlm.errors import ExitCode
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.simulate.simulation import SimulationResult, simulate
from eventlm.replay.simulate.trace import SimulatedTrace
from eventlm.replay.verify.verifier import verify
from tests.replay.made_workloads import COST, PREDICTOR, make_engine, make_workload


def record(folder: Path, seed: int, **options: object) -> SimulationResult:
    """Simulate a made workload and record it."""
    return simulate(make_workload(seed), make_engine(**options), COST, predictor=PREDICTOR, record=folder)


@pytest.mark.parametrize("policy", BUILT_IN["policy"])
@pytest.mark.parametrize("batcher", BUILT_IN["batcher"])
def test_simulated_runs_verify_under_every_policy(tmp_path: Path, policy: str, batcher: str) -> None:
    for seed, router in enumerate(BUILT_IN["router"]):
        options = {"policy": policy, "batcher": batcher, "router": router, "replicas": 1 + seed % 3}
        result = record(tmp_path, seed, num_blocks=40 + 20 * seed, **options)
        verified = verify(result.run_folder)
        assert verified.divergence is None
        assert verified.clean_end
        assert verified.warnings == []
        assert verified.num_decisions > 200
        assert verified.num_checkpoints >= 1
        assert result.summary.num_unserved == 0


def test_trace_commands_read_a_simulated_run(tmp_path: Path) -> None:
    result = record(tmp_path, 3)
    found = info(Path(result.run_folder) / "trace.jsonl")
    stats = trace_stats(result.run_folder)
    assert (tmp_path / "latest").resolve() == Path(result.run_folder)
    assert found.check.num_events == stats.snapshot.num_events == result.num_events
    assert found.num_steps == result.summary.num_steps
    assert stats.snapshot.num_requests == 40
    assert stats.snapshot.duration_ns >= result.outcome.duration_ns
    assert sum(replica.num_steps for replica in stats.snapshot.replicas) == result.summary.num_steps
    mode = stat.S_IMODE((Path(result.run_folder) / "trace.jsonl").stat().st_mode)
    assert mode == 0o600


def test_the_header_says_that_the_run_is_simulated(tmp_path: Path) -> None:
    result = record(tmp_path, 1)
    with LogReader(result.run_folder) as log:
        simulated = log.header.host["simulated"]
        assert simulated["workload"] == "seed 1"
        assert simulated["cost_model"]["base_ps"] == COST.base_ps
        assert log.header == result.header


def test_two_processes_write_the_same_trace(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.replay.simulate.test_trace import record; "
        "print(record(sys.argv[1], 5, policy='lrs', batcher='dynamic', replicas=2).run_folder)"
    )
    bodies = []
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        with LogReader(process.stdout.strip()) as log:
            lines = [line.body for line in log]
        header = json.loads(lines[0] + b"}")
        del header["run"], header["unix_start_ns"]
        bodies.append((header, lines[1:]))
    assert bodies[0] == bodies[1]


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogWriteError, match="choose another folder"):
        record(tmp_path / "file", 1)


def test_a_full_disk_ends_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    num_written = 0

    def write(fd: int, content: bytes) -> int:
        nonlocal num_written
        num_written += len(content)
        if num_written > 100_000:
            raise OSError(28, "No space left on device")
        return real_write(fd, content)

    monkeypatch.setattr("os.write", write)
    with pytest.raises(LogWriteError, match="No space left") as caught:
        record(tmp_path, 1)
    assert caught.value.exit_code == ExitCode.FAILED
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_whole_is_removed_and_the_latest_is_again_the_run_before(tmp_path: Path) -> None:
    before = Path(record(tmp_path, 1).run_folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(LogWriteError, match="File too large"):
            record(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([before.name, "latest"])
    assert (tmp_path / "latest").resolve() == before


def test_traces_of_one_name_are_numbered(tmp_path: Path) -> None:
    whole = record(tmp_path, 1)
    for name in ("again", "again-2", "again-3"):
        with LogReader(whole.run_folder) as log, SimulatedTrace(tmp_path, "again") as trace:
            for line in log:
                trace.see(line.event())
        assert trace.run_folder == tmp_path / name
        with LogReader(tmp_path / name) as log:
            assert log.header.run == name
        assert verify(tmp_path / name).divergence is None


def test_a_trace_that_is_left_early_has_no_clean_end(tmp_path: Path) -> None:
    whole = record(tmp_path, 1)
    with LogReader(whole.run_folder) as log, SimulatedTrace(tmp_path, "cut") as trace:
        for line in log:
            if line.s < 100:
                trace.see(line.event())
    result = verify(tmp_path / "cut")
    assert result.divergence is None
    assert not result.clean_end
