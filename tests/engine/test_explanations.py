"""Explanations by processes of their own: how many run, how long, and that none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from eventlm.engine import explanations
from eventlm.engine.explanations import Explanations, NotExplainedError
from eventlm.system.processes import SystemProcesses
from tests.processes import children, is_running, wait_until
from tests.replay.traces import record, small_machine

RUN = Path("no such run")


@pytest.fixture
def slow_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the process that explains: one that takes for ever."""
    (tmp_path / "slow_explain_worker.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(explanations, "WORKER_MODULE", "slow_explain_worker")


def mine() -> set[int]:
    return {pid for pid in children(os.getpid()) if is_running(pid)}


async def test_a_run_is_explained(tmp_path: Path) -> None:
    path = record(tmp_path, small_machine({"type": "fcfs"}))
    before = mine()
    # Its first request; the header and the workers come before it.
    seq = next(int(line.split('"s":')[1].split(",")[0]) for line in path.read_text().splitlines() if '"arrive"' in line)
    answer = await Explanations(SystemProcesses()).explain(path.parent, [seq])
    assert f'"request":{seq}' in answer.explanations[0]
    assert f"Request {seq}" in answer.text or f"Sample {seq}." in answer.text
    assert str(tmp_path) not in answer.text + "".join(answer.warnings)
    assert mine() == before


async def test_missing_events_are_reported_without_the_path_of_the_trace(tmp_path: Path) -> None:
    path = record(tmp_path, small_machine({"type": "fcfs"}))
    with pytest.raises(NotExplainedError) as caught:
        await Explanations(SystemProcesses()).explain(path.parent, [10**9])
    assert caught.value.reason == "not_kept"
    assert str(caught.value).startswith("the trace has no request 1000000000, its events are 0 to ")
    with pytest.raises(NotExplainedError) as caught:
        await Explanations(SystemProcesses()).explain(tmp_path / "nowhere", [1])
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.usefixtures("slow_worker")
async def test_one_that_takes_too_long_is_ended() -> None:
    before = mine()
    with pytest.raises(NotExplainedError) as caught:
        await Explanations(SystemProcesses(), timeout_seconds=0.05).explain(RUN, [1])
    assert caught.value.reason == "too_long"
    assert mine() == before


@pytest.mark.usefixtures("slow_worker")
async def test_few_run_and_few_wait_and_a_caller_that_leaves_ends_its_process() -> None:
    before = mine()
    asked = Explanations(SystemProcesses(), max_running=1, max_waiting=2)
    tasks = [asyncio.create_task(asked.explain(RUN, [1])) for _ in range(3)]
    await asyncio.to_thread(wait_until, lambda: mine() - before)
    with pytest.raises(NotExplainedError) as caught:
        await asked.explain(RUN, [1])
    assert caught.value.reason == "too_many"
    assert len(mine() - before) == 1
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert mine() == before


async def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "WORKER_MODULE", "eventlm.no_such_module")
    with pytest.raises(NotExplainedError) as caught:
        await Explanations(SystemProcesses()).explain(RUN, [1])
    assert caught.value.reason == "failed"


@pytest.mark.usefixtures("slow_worker")
async def test_one_owner_cannot_take_all_places() -> None:
    asked = Explanations(SystemProcesses(), max_running=1, max_waiting=8, max_per_owner=2)
    before = mine()
    tasks = [asyncio.create_task(asked.explain(RUN, [1], owner="a")) for _ in range(2)]
    await asyncio.to_thread(wait_until, lambda: mine() - before)
    with pytest.raises(NotExplainedError) as caught:
        await asked.explain(RUN, [1], owner="a")
    assert caught.value.reason == "too_many"
    # Others go on, and so do those without a key, who are not told apart.
    others = [asyncio.create_task(asked.explain(RUN, [1], owner=owner)) for owner in ("b", "", "", "")]
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    for task in [*tasks, *others]:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    with pytest.raises(NotExplainedError) as caught:
        await Explanations(SystemProcesses(), timeout_seconds=0.05).explain(RUN, [1], owner="a")
    assert caught.value.reason == "too_long"
    assert mine() == before
