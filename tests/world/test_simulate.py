"""The tool that runs seeds, with planted failures, which forks inherit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.cli.main import main as eventlm
from tests.world import simulate
from tests.world.invariants.checks import BrokenInvariant
from tests.world.plans import faults
from tests.world.plans.faults import FaultKind
from tests.world.plans.plan import Plan, draw_plan
from tests.world.run import Run
from tests.world.swarm import command
from tests.world.swarm.cases import Case, run_case
from tests.world.swarm.handlers import all_handlers

#: A plan with few visits, which takes a fraction of a second.
_PLAN = next(
    plan for plan in map(draw_plan, range(10_000)) if not plan.gateway and len(plan.visits) < 4 and len(plan.faults) > 4
)
_SEED = str(_PLAN.seed)


def _plant(monkeypatch: pytest.MonkeyPatch, happen: Callable[[Run, int], bool], plan: Plan = _PLAN) -> int:
    """Make one of the plan's faults, and all of its kind, do something else. Returns its number."""
    fault = plan.faults[1]
    monkeypatch.setitem(faults.FAULTS, fault.kind, FaultKind(faults.FAULTS[fault.kind].weight, happen))
    return fault.number


def _break(run: Run, detail: int) -> bool:
    raise BrokenInvariant("planted", "it is broken")


def test_seeds_that_pass_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([f"{_SEED}-{_PLAN.seed + 1}", "--jobs", "2"]) == 0
    rows = dict(re.findall(r"^(.*?) {2,}([\d,.]+)$", capsys.readouterr().out, re.MULTILINE))
    assert (rows["seeds"], rows["failures"], rows["check: the server ends in order"]) == ("2", "0", "2")


def test_a_failure_is_shrunk_to_the_fault_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _plant(monkeypatch, _break)
    assert simulate.main([_SEED, "--jobs", "1"]) == 1
    first, shrunk = _commands(capsys.readouterr().out)
    assert first == [_SEED]
    assert simulate.main([*first, "--shrink", "0"]) == 1
    assert simulate.main([*shrunk, "--shrink", "0"]) == 1
    assert "planted" in capsys.readouterr().out
    left_out = {int(number) for number in shrunk[shrunk.index("--without-faults") + 1].split(",")}
    assert len(left_out) == len(_PLAN.faults) - 1


def _commands(output: str) -> list[list[str]]:
    """The arguments of the commands in the output."""
    return [
        shlex.split(line)[3:] for line in output.splitlines() if line.startswith("  python -m tests.world.simulate")
    ]


@pytest.mark.parametrize(
    ("happen", "name", "limit"),
    [(lambda *_: time.sleep(600), "hung", "5"), (lambda *_: os._exit(3), "died", "300")],
    ids=["hangs", "dies"],
)
def test_a_process_that_gives_no_result_is_a_failure_of_its_seed(
    happen: Callable[[Run, int], bool],
    name: str,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _plant(monkeypatch, happen)
    assert simulate.main([_SEED, "--shrink", "0", "--limit", limit]) == 1
    assert f"failure: {name}" in capsys.readouterr().out


def test_other_bytes_in_a_fresh_process_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main([_SEED, "--twice"]) == 0
    monkeypatch.setattr(Run, "_add_up", lambda run: None)
    assert simulate.main([_SEED, "--twice", "--shrink", "0"]) == 1
    assert "failure: not deterministic" in capsys.readouterr().out


def test_what_a_world_leaves_is_collected_while_it_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = []
    monkeypatch.setattr(Run, "_add_up", lambda run: worlds.append(weakref.ref(run.world)))
    assert run_case(Case(_PLAN.seed)).failure is None
    assert [world() for world in worlds] == [None]


def test_many_seeds_without_a_kind_of_fault_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_ENOUGH_SEEDS", 1)
    assert simulate.main([_SEED]) == 1
    assert "have never struck" in capsys.readouterr().out


def test_several_failures_are_all_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Run, "_check_rest", _fail)
    seeds = f"{_SEED}-{_PLAN.seed + 2}"
    assert simulate.main([seeds, "--shrink", "0", "--keep-going"]) == 1
    output = capsys.readouterr().out
    assert re.search("failure: ValueError +3$", output, re.MULTILINE)
    assert len(_commands(output)) == 3


def _fail(run: Run) -> None:
    raise ValueError


def test_a_timeline_lies_beside_the_trace_that_it_tells_of(tmp_path: Path) -> None:
    assert simulate.main([_SEED, "--timeline", str(tmp_path)]) == 0
    text = (tmp_path / "timeline.txt").read_text()
    assert "client 0" in text
    assert "fault 1" in text
    assert "begins as process" in text
    assert "ends with status 0" in text
    assert eventlm(["report", str(tmp_path / "runs/latest"), "-o", str(tmp_path / "report.html")]) == 0


def test_coverage_lists_the_handlers_that_have_not_run() -> None:
    arguments = [sys.executable, "-m", "tests.world.simulate", _SEED, "--coverage"]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    num_run, num_all = map(int, re.findall("([0-9]+) of ([0-9]+) handlers", output)[0])
    assert num_all == len(all_handlers())
    assert num_run > 0
    listed = set(re.findall("^  (eventlm/.*)$", output, re.MULTILINE))
    assert listed < all_handlers()
    # The accept loop ends with BlockingIOError, so this handler always runs.
    assert not any("listener.py" in name and "BlockingIOError" in name for name in listed)


def test_many_seeds_without_a_handler_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main([_SEED]) == 0
    monkeypatch.setattr(command, "_ENOUGH_SEEDS_FOR_HANDLERS", 1)
    monkeypatch.setattr(command, "watched", {"any"})
    assert simulate.main([_SEED]) == 1
    assert "has no reason why" in capsys.readouterr().out
