"""Random runs of other servers verify whatever the hash seed, in one file or in many, alone and beside own workers."""

from __future__ import annotations

from pathlib import Path

from tests.replay.workload_runs import in_processes

NUM_RUNS = 14


def test_runs_of_other_servers_end_as_they_must_and_verify(tmp_path: Path) -> None:
    # While they are recorded the state is validated after every event, and every text is compared.
    counts = in_processes("record", tmp_path, 0, NUM_RUNS, hash_seed=0, kind="--backends")
    for tag in ("forward", "streamed", "relay", "forward_ended", "forward_failed", "retry", "withdraw"):
        assert counts[tag] > NUM_RUNS // 4, tag
    for tag in ("backend_up", "backend_down", "backend_state", "launch"):
        assert counts[tag] > NUM_RUNS // 4, tag
    again = in_processes("verify", tmp_path, 0, NUM_RUNS, hash_seed=1)
    assert again["segments"] == NUM_RUNS + counts["snapshot"] > NUM_RUNS
    assert again["decisions verified"] > 1000
