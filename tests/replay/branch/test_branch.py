"""Branches: an unchanged one is the run, a changed one is a trace that verifies, the figures are of the rest."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import UsageError
from eventlm.events import Emitted, Header, PolicySwapped, Snapshot, StepCompleted, WorkerLost
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.branch.branch import branch
from eventlm.replay.branch.point import BranchPlace, BranchPoint, find_point
from eventlm.replay.diff.diff import diff, read_side
from eventlm.replay.explain.explainer import explain
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.what_if import NullTestError, what_if
from eventlm.replay.workload.recorded_run import read_run
from tests.replay.branch_runs import (
    SEGMENT_BYTES,
    drain_ends,
    is_speculative,
    record_random,
    record_with_gap,
    without_first_half,
)
from tests.replay.made_workloads import COST
from tests.replay.what_if_runs import events_of, made_run, metric_of, policy, slower


def busiest(path: Path) -> BranchPoint:
    """The drain with the most requests under way, of some."""
    ends = drain_ends(path)
    chosen = [
        find_point(path, BranchPlace(event=s)) for s in ends[len(ends) // 4 : len(ends) // 2 : len(ends) // 24 + 1]
    ]
    return max(chosen, key=lambda point: len(point.state.requests))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples, turns, cancels, ends in the text; more requests than may run."""
    return made_run(tmp_path_factory.mktemp("runs"), 5, num_requests=60, max_num_seqs=3, num_blocks=48)


@pytest.fixture(scope="module")
def point(run: Path) -> BranchPoint:
    found = busiest(run)
    assert len(found.state.requests) > 2
    assert any(replica.steps for replica in found.state.replicas)
    return found


def test_with_its_own_cost_model_the_unchanged_branch_is_the_run(run: Path, point: BranchPoint, tmp_path: Path) -> None:
    result = branch(run, point, cost_model=COST, output=tmp_path)
    found = result.what_if
    assert found.null is not None
    assert found.null.num_decisions > 100
    for pair in result.pairs:
        assert pair.recorded == pair.branch
        if pair.request < point.s:
            assert pair.branch_request == pair.request
    # The same drains: after its header and snapshot, it is the run.
    before = [each for each in events_of(run) if each.s > point.s and each.__struct_config__.tag not in ("checkpoint",)]
    header, snapshot, *after = events_of(found.alternatives[0].run_folder)
    assert isinstance(header, Header)
    assert isinstance(snapshot, Snapshot)
    assert (header.s, snapshot.s, header.ts) == (point.s + 1, point.s + 2, point.now_ns)
    after = [each for each in after if each.__struct_config__.tag not in ("checkpoint",)]
    times = [(each.__struct_config__.tag, each.ts) for each in before]
    assert [(each.__struct_config__.tag, each.ts) for each in after] == times


def test_a_branch_is_a_trace_that_every_tool_takes(run: Path, point: BranchPoint, tmp_path: Path) -> None:
    changes = Changes(policy={"type": "lrs"}, batcher={"type": "dynamic"}, settings={"max_num_seqs": 5})
    result = branch(run, point, changes, output=tmp_path)
    simulated = result.what_if.alternatives[0]
    path = Path(simulated.run_folder) / "trace.jsonl"
    verified = verify(path, check_invariants=True)
    assert (verified.exit_code, verified.clean_end, verified.first_s) == (0, True, point.s + 1)
    assert verified.num_decisions > 100
    assert verified.num_checkpoints > 0
    events = events_of(path.parent)
    swap = next(each for each in events if isinstance(each, PolicySwapped))
    assert (swap.name, swap.s, swap.ts) == ("lrs", point.s + 3, point.now_ns + 1)
    assert isinstance(events[0], Header)
    assert events[0].run == f"{result.what_if.header.run}-branch-{point.s}-lrs--dynamic--max-num-seqs-5"
    stats = trace_stats(path)
    assert stats.snapshot.num_requests == result.num_later
    assert diff(read_side(run / "trace.jsonl"), read_side(path)).num_pairs == result.num_later
    slowest = max(
        (each for each in simulated.outcome.sequences if each.request > point.s), key=lambda each: each.e2e_ns
    )
    explained = explain(path, [(slowest.request, slowest.index)])
    assert explained.explanations[0].end_ns == slowest.ended_ns
    # A branch of the branch, and a what-if of it.
    again = find_point(path, BranchPlace(event=drain_ends(path)[10]))
    second = branch(path, again, Changes(router={"type": "least_loaded"}), output=tmp_path)
    assert verify(second.what_if.alternatives[0].run_folder).exit_code == 0
    assert what_if(path, [policy("edf")]).null is None


def test_a_policy_moves_requests_and_the_pairs_say_which(run: Path, point: BranchPoint) -> None:
    result = branch(run, point, Changes(policy={"type": "lrs"}), cost_model=COST)
    whole = {(each.request, each.index) for each in result.what_if.recorded.sequences}
    assert {(pair.request, pair.index) for pair in result.pairs if pair.recorded is not None} == whole
    live = {request.arrival.s for request in point.state.requests}
    assert live <= {pair.request for pair in result.pairs}
    assert all(pair.branch_request == pair.request for pair in result.pairs if pair.request in live)
    moved = [pair for pair in result.pairs if pair.e2e_difference_ns]
    assert any((pair.e2e_difference_ns or 0) < 0 for pair in moved)
    assert any((pair.e2e_difference_ns or 0) > 0 for pair in moved)
    assert result.num_live == len(live)
    assert result.what_if.comparison.won_lost[0].num_won > 0


def test_a_cost_model_that_is_off_widens_the_error_bars(run: Path, point: BranchPoint) -> None:
    changes = Changes(policy={"type": "lrs"})
    right = branch(run, point, changes, cost_model=COST).what_if
    wrong = branch(run, point, changes, cost_model=slower(COST, 30)).what_if
    for name in ("ttft_p90", "e2e_p90"):
        narrow, wide = metric_of(right, name), metric_of(wrong, name)
        assert narrow.baseline == narrow.recorded
        assert wide.error_bar is not None
        assert narrow.error_bar is not None
        assert wide.error_bar > narrow.error_bar


def test_the_same_bytes_come_out_twice(run: Path, point: BranchPoint, tmp_path: Path) -> None:
    changes = Changes(policy={"type": "edf"})
    recorded = read_run(run)
    found = [
        branch(run, point, changes, run=recorded, output=tmp_path / name).what_if.alternatives[0] for name in ("a", "b")
    ]
    first, second = ((Path(each.run_folder) / "trace.jsonl").read_bytes() for each in found)
    assert first == second


@pytest.mark.parametrize("seed", [5, 8, 13, 32, 63])
def test_whatever_went_wrong_a_branch_comes_to_an_end_and_verifies(tmp_path: Path, seed: int) -> None:
    path = record_random(tmp_path, seed, segment_bytes=SEGMENT_BYTES)
    if is_speculative(path):
        pytest.skip("its rows produce several tokens")
    if seed % 2:
        path = without_first_half(path)
    ends = drain_ends(path)
    for s, name in ((ends[len(ends) // 5], "lpm"), (ends[len(ends) // 2], "edf")):
        point = find_point(path, BranchPlace(event=s))
        changes = Changes(policy={"type": name}, router={"type": "least_loaded"})
        result = branch(path, point, changes, cost_model=COST, output=tmp_path / f"{s}")
        verified = verify(result.what_if.alternatives[0].run_folder, check_invariants=True)
        assert (verified.exit_code, verified.clean_end) == (0, True)


def test_steps_in_flight_are_lost_with_their_worker(tmp_path: Path) -> None:
    path = record_random(tmp_path, 3)
    lost = next(event for event in events_of(path) if isinstance(event, WorkerLost))
    point = find_point(path, BranchPlace(event=max(s for s in drain_ends(path) if s < lost.s)))
    assert point.state.replicas[lost.replica].steps
    result = branch(path, point, cost_model=slower(COST, 100_000), output=tmp_path / "out")
    events = events_of(result.what_if.alternatives[0].run_folder)
    assert any(isinstance(event, WorkerLost) and event.ts == lost.ts for event in events)
    num_completed, num_emitted = (sum(isinstance(e, kind) for e in events) for kind in (StepCompleted, Emitted))
    assert num_completed == num_emitted


def test_a_run_that_was_killed_goes_on_in_its_branch(tmp_path: Path) -> None:
    path = record_random(tmp_path, 2) / "trace.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = next(s for s in drain_ends(path) if s > len(lines) // 2)
    cut = next(index for index, line in enumerate(lines) if index > last and b'"p":1' in line)
    path.write_bytes(b"".join(lines[:cut]))
    point = find_point(path, BranchPlace(event=last))
    result = branch(path, point, cost_model=COST, output=tmp_path / "out")
    assert result.num_live > 0
    assert result.what_if.recorded.num_unfinished > 0
    assert result.what_if.alternatives[0].outcome.num_unfinished == 0
    assert verify(result.what_if.alternatives[0].run_folder).exit_code == 0


def test_nothing_left_to_do_is_refused(run: Path) -> None:
    last = find_point(run, BranchPlace(event=events_of(run)[-1].s))
    with pytest.raises(UsageError, match="there is nothing left to do"):
        branch(run, last)


def test_a_gap_after_the_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_with_gap(tmp_path, monkeypatch)
    with LogReader(path) as log:
        for _ in log:
            pass
        first, last = log.gaps[0], log.gaps[-1]
    with pytest.raises(UsageError, match=r"after event [\d,]+ the trace has a gap, events"):
        branch(path, find_point(path, BranchPlace(event=2)))
    # Behind all gaps, in the segment alone, what was live is in its snapshot.
    segment = next(each for each in path.glob("trace*.jsonl") if _first_s(each) == last.last + 1)
    point = find_point(segment, BranchPlace())
    assert point.s > first.last
    if point.state.requests:
        with pytest.raises(UsageError, match="arrived in a gap of the trace or before it"):
            branch(path, _unknown(point))
    result = branch(segment, point, cost_model=COST)
    assert result.num_live == len(point.state.requests)


def _first_s(path: Path) -> int:
    with LogReader(path) as log:
        return log.header.s


def _unknown(point: BranchPoint) -> BranchPoint:
    """The same with a request that the log does not have."""
    state: StateSnapshot = point.state
    request = state.requests[0]
    lost = structs.replace(request, arrival=structs.replace(request.arrival, s=1 << 40))
    return point._replace(snapshot=msgspec.json.encode(structs.replace(state, requests=[lost])))


def test_a_run_that_cannot_be_repeated_is_no_ground_for_a_branch(run: Path, point: BranchPoint) -> None:
    recorded = read_run(run)
    steps = [step for step in recorded.steps if step.s > point.s]
    recorded.steps[recorded.steps.index(steps[5])] = steps[5]._replace(completed_ns=steps[5].completed_ns + 1)
    with pytest.raises(NullTestError, match="the null test failed"):
        branch(run, point, run=recorded)
