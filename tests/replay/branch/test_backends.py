"""Branches of runs whose replicas are other servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.replay.branch.branch import branch
from eventlm.replay.branch.point import BranchPlace, find_point
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import verify
from tests.replay.backend_runs import record_backends
from tests.replay.backend_world import Traits, World, shared_prefixes
from tests.replay.what_if_runs import metric_of


def test_what_is_under_way_goes_on(tmp_path: Path) -> None:
    work = shared_prefixes(3, num_requests=200, per_second=40)
    run = World(tmp_path / "run", work, traits=Traits(fails=0.05), retry_backoff_ms=5, router="round_robin").run()
    point = find_point(run, BranchPlace(time_ns=2_000_000_000))
    found = branch(run, point, Changes(router={"type": "prefix_affinity"}), output=tmp_path / "out")
    assert found.num_live > 5
    e2e = metric_of(found.what_if, "e2e_p50")
    assert e2e.baseline == pytest.approx(e2e.recorded, rel=0.1)
    predicted = e2e.alternatives[0].value
    assert predicted is not None
    assert e2e.recorded is not None
    assert predicted < e2e.recorded
    [alternative] = found.what_if.alternatives
    assert alternative.outcome.num_unfinished == 0
    assert verify(alternative.run_folder).exit_code == 0


@pytest.mark.parametrize("seed", range(6))
def test_whatever_went_wrong_a_branch_comes_to_an_end_and_verifies(seed: int, tmp_path: Path) -> None:
    run = record_backends(tmp_path / "run", seed)
    point = find_point(run, BranchPlace(event=150))
    found = branch(run, point, Changes(policy={"type": "edf"}), output=tmp_path / "out", num_draws=2)
    [alternative] = found.what_if.alternatives
    assert alternative.outcome.num_unfinished == 0
    assert verify(alternative.run_folder).exit_code == 0
