"""The tables of a branch, and its object."""

from __future__ import annotations

import json

import msgspec
import pytest

from eventlm.replay.branch.branch import BranchResult, branch
from eventlm.replay.branch.point import BranchPlace, find_point
from eventlm.replay.branch.report import NUM_PAIRS, render, to_object
from eventlm.replay.rebuild import Changes
from eventlm.replay.why.constraints import named
from tests.replay.branch_runs import drain_ends
from tests.replay.made_workloads import COST
from tests.replay.what_if_runs import made_run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BranchResult:
    path = made_run(tmp_path_factory.mktemp("runs"), 5, num_requests=60, max_num_seqs=3, num_blocks=48)
    ends = drain_ends(path)
    point = find_point(path, BranchPlace(event=ends[len(ends) // 3]))
    return branch(path, point, Changes(policy={"type": "lrs"}), cost_model=COST)


def test_the_table(result: BranchResult) -> None:
    lines = render(result).splitlines()
    assert lines[0].startswith(f"branch after event {result.s:,}, at ")
    assert lines[0].endswith(f"under way, {result.num_later} to come")
    heading = next(line for line in lines if "baseline" in line)
    assert heading.split() == ["recorded", "baseline", "error", "bar", "branch"]
    assert any(line.startswith("branch         lrs") for line in lines)
    assert all(len(line) <= 120 for line in lines if result.what_if.path not in line)
    first = next(index for index, line in enumerate(lines) if line.startswith("request  "))
    rows = lines[first + 1 : first + 1 + 2 * NUM_PAIRS]
    names = {named((pair.request, pair.index)) for pair in result.pairs}
    assert {row.split()[0] for row in rows} <= names
    changes = [float(row.split()[4].replace(",", "")) for row in rows]
    assert changes == sorted(changes)
    assert changes[0] < 0 < changes[-1]


def test_the_object_has_all_pairs_and_the_figures(result: BranchResult) -> None:
    found = json.loads(msgspec.json.encode(to_object(result)))
    assert found["branch"] == {
        "s": result.s,
        "ts": result.now_ns,
        "num_live": result.num_live,
        "num_later": result.num_later,
        "trace": None,
    }
    assert len(found["pairs"]) == len(result.pairs)
    pair = found["pairs"][0]
    assert pair["e2e_difference_ns"] == pair["branch"]["e2e_ns"] - pair["recorded"]["e2e_ns"]
    assert found["metrics"]["ttft_p50"]["unit"] == "ns"
    assert found["num_requests"] == result.num_live + result.num_later
