"""Verification: a run verifies, however it ends, and a core that goes wrong is told on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.core import scheduler
from eventlm.core.state.block_pool import BlockPool
from eventlm.errors import TornTraceError
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.replay.conftest import Recording
from tests.replay.traces import divergence_of, indices, record, small_machine, tampered, write_objects
from tests.workload import Chaos


def test_a_recorded_run_verifies(fcfs_run: Recording) -> None:
    result = verify(fcfs_run.path, check_invariants=True)
    assert result.divergence is None
    assert (result.exit_code, result.clean_end, result.warnings) == (0, True, [])
    assert result.num_events == len(fcfs_run.objects)
    assert result.num_decisions == sum(item["t"] in DECISION_TAGS for item in fcfs_run.objects) > 100
    assert result.num_checkpoints == len(indices(fcfs_run.objects, "checkpoint")) > 1


def test_rewriting_a_trace_changes_nothing(fcfs_run: Recording, tmp_path: Path) -> None:
    # What the tests below do to a trace, they do on purpose.
    assert tampered(fcfs_run.path, tmp_path / "t", lambda objects: None).read_bytes() == fcfs_run.path.read_bytes()


def test_progress_is_reported_to_the_last_byte(fcfs_run: Recording) -> None:
    told: list[tuple[int, int]] = []
    verify(fcfs_run.path, on_progress=lambda done, total: told.append((done, total)))
    size = fcfs_run.path.stat().st_size
    assert told[-1] == (size, size)


def test_a_killed_run_verifies_up_to_its_last_line_wherever_that_is(fcfs_run: Recording, tmp_path: Path) -> None:
    for last in range(2, len(fcfs_run.objects) - 1, 11):
        result = verify(write_objects(tmp_path / "t", fcfs_run.objects[:last]))
        assert (result.exit_code, result.num_events, result.clean_end) == (0, last, False)
        assert len(result.warnings) == 1
        assert "no clean end" in result.warnings[0]


def test_a_torn_last_line_is_a_warning_or_an_error(fcfs_run: Recording, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(fcfs_run.path.read_bytes()[:-9])
    result = verify(path)
    assert (result.exit_code, result.num_events) == (0, len(fcfs_run.objects) - 1)
    assert "is torn" in result.warnings[0]
    with pytest.raises(TornTraceError):
        verify(path, strict=True)


def test_a_trace_that_is_still_being_written_verifies_as_far_as_it_goes(tmp_path: Path, fcfs_run: Recording) -> None:
    with LogWriter(real_system(), tmp_path, "run") as writer:
        for item in fcfs_run.objects[:50]:
            writer.append(msgspec.json.encode(item)[:-1])
        writer.flush()
        result = verify(writer.path)
    assert (result.exit_code, result.still_being_written, result.num_events) == (0, True, 50)
    assert "still being written" in result.warnings[0]


def test_a_core_that_lets_sequences_wait_for_ever_is_reported(
    fcfs_run: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "plan_step", lambda *arguments: False)
    found = divergence_of(verify(fcfs_run.path, check_invariants=True))
    assert (found.code, found.exit_code) == ("liveness", 12)
    assert "waits" in found.what


def test_a_core_that_loses_blocks_is_reported(fcfs_run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release_all", lambda self, table: None)
    found = divergence_of(verify(fcfs_run.path, check_invariants=True))
    assert (found.code, found.exit_code) == ("safety", 11)
    assert "references, and is in" in found.what


def test_a_run_with_everything_that_goes_wrong_verifies_with_invariants(tmp_path: Path) -> None:
    machine = small_machine({"type": "lrs"}, num_replicas=2, max_steps_in_flight=3)
    path = record(tmp_path, machine, chaos=Chaos(kills=3), seed=5)
    assert verify(path, check_invariants=True).exit_code == 0
