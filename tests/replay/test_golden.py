"""Golden traces verify, can be made again byte for byte, and one that was broken on purpose fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.replay.verify.verifier import verify
from tests.replay.golden import BROKEN, FOLDER, GOLDEN, MAX_BYTES, record_golden
from tests.replay.traces import read_objects


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces_verify(name: str) -> None:
    result = verify(FOLDER / f"{name}.jsonl", check_invariants=True)
    assert result.divergence is None
    assert (result.exit_code, result.warnings, result.clean_end) == (0, [], True)
    assert result.num_decisions > 100


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces_can_be_recorded_again(name: str, tmp_path: Path) -> None:
    golden = FOLDER / f"{name}.jsonl"
    assert golden.stat().st_size < MAX_BYTES
    recorded = record_golden(name, tmp_path).read_bytes()
    assert recorded == golden.read_bytes(), "if that was meant: python -m tests.replay.golden"


def test_golden_traces_hold_what_they_are_there_for() -> None:
    seen: dict[str, set[str]] = {}
    for name in GOLDEN:
        objects = read_objects(FOLDER / f"{name}.jsonl")
        seen[name] = {item["t"] for item in objects} | {f"{item['t']} {item.get('reason')}" for item in objects}
    tight = {"preempt memory", "preempt admission", "closing", "text_end", "cancel", "set_timer", "timer"}
    assert seen["edf_tight"] >= tight
    assert seen["lrs_dying_workers"] >= {"preempt lost", "worker_lost", "desync", "grammar", "route"}
    assert seen["edf_recovered"] >= {"recovered killed", "preempt lost", "closing", "grammar"}
    objects = read_objects(FOLDER / "fcfs_recurrent.jsonl")
    states = [state for item in objects for state in item.get("states", [])]
    assert any(source not in (-1, slot) for _, slot, source, _ in states)
    # Some of prompts, and some of decodes.
    assert {min(item["states"])[0] < len(item.get("decodes", [])) for item in objects if "states" in item} == {
        True,
        False,
    }
    assert "preempt admission" in seen["fcfs_recurrent"]


def test_the_broken_trace_fails_at_its_broken_launch() -> None:
    found = verify(FOLDER / f"{BROKEN}.jsonl").divergence
    assert found is not None
    assert (found.code, found.exit_code) == ("different_decision", 10)
    assert len(found.fields) == 1
    assert found.fields[0].startswith("blocks[0]: recorded ")
