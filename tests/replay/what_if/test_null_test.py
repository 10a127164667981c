"""Recorded runs are repeated by the simulator, whatever went wrong in them; a change in them is found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from eventlm.core.state.sequence import State
from eventlm.errors import UsageError
from eventlm.replay.branch.point import BranchPlace, BranchPoint, find_point
from eventlm.replay.rebuild import rebuild
from eventlm.replay.what_if.null_test import NullResult, null_test
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from eventlm.replay.workload.workload import Cancel, Workload
from tests.replay.branch_runs import (
    SEGMENT_BYTES,
    drain_ends,
    is_speculative,
    random_points,
    record_random,
    without_first_half,
)
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.replicaset_runs import record_sets
from tests.replay.what_if_runs import MILLISECOND, made_run, requests_of, run_of

#: Every policy, batcher and router comes up in them.
SEEDS = range(0, 7 * 24, 7)


def test_random_workloads_are_repeated(tmp_path: Path) -> None:
    num_repeated = num_decisions = 0
    for seed in SEEDS:
        path = record_random(tmp_path, seed, segment_bytes=SEGMENT_BYTES if seed % 5 == 0 else 0)
        if is_speculative(path):
            continue
        run = read_run(path)
        result = null_test(run, path)
        assert result.difference == "", f"workload {seed}: {result.difference}"
        num_repeated += 1
        num_decisions += result.num_decisions
    assert num_repeated > len(SEEDS) // 3
    assert num_decisions > 5_000


def test_random_workloads_of_several_replicasets_are_repeated(tmp_path: Path) -> None:
    chance = random.Random(3)
    num_decisions = 0
    for seed in range(6):
        path = record_sets(tmp_path, seed, segment_bytes=SEGMENT_BYTES if seed % 4 == 0 else 0)
        result = null_test(read_run(path), path)
        assert result.difference == "", f"workload {seed}: {result.difference}"
        num_decisions += result.num_decisions
        for rest in rests_of(path, 1, chance):
            assert rest.result.difference == "", f"{path} from event {rest.point.s}: {rest.result.difference}"
    assert num_decisions > 1_000


def test_another_length_is_found(tmp_path: Path) -> None:
    path = record_random(tmp_path, 2)
    run = read_run(path)
    index = next(i for i, request in enumerate(run.workload.requests) if request.outputs[0].reason == "length")
    request = run.workload.requests[index]
    shorter = structs.replace(request.outputs[0], worker_end=request.outputs[0].num_tokens - 1)
    run.workload.requests[index] = structs.replace(request, outputs=[shorter, *request.outputs[1:]])
    result = null_test(run, path)
    assert result.difference.startswith("event ")


def test_another_duration_is_found(tmp_path: Path) -> None:
    path = record_random(tmp_path, 2)
    run = read_run(path)
    step = run.steps[len(run.steps) // 2]
    run.steps[len(run.steps) // 2] = step._replace(completed_ns=step.completed_ns + 1)
    assert null_test(run, path).difference.startswith("event ")


def test_a_torn_run_is_repeated_as_far_as_it_goes(tmp_path: Path) -> None:
    path = record_random(tmp_path, 2) / "trace.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(index for index, line in enumerate(lines) if index > len(lines) // 2 and b'"t":"launch"' in line)
    path.write_bytes(b"".join(lines[:cut]))
    run = read_run(path)
    assert run.num_unfinished > 0
    assert null_test(run, path).difference == ""


def test_speculation_is_refused(tmp_path: Path) -> None:
    path = next(path for path in (record_random(tmp_path, seed) for seed in range(20)) if is_speculative(path))
    with pytest.raises(UsageError, match="speculation"):
        read_run(path)


class Rest(NamedTuple):
    """A point of a run, and the null test from there."""

    run: RecordedRun
    point: BranchPoint
    result: NullResult


def rests_of(path: Path, count: int, chance: random.Random) -> Iterator[Rest]:
    """The rest of a run repeated from so many of its drains."""
    run = read_run(path)
    rebuilt = rebuild(run.header)
    for point in random_points(path, count, chance):
        yield Rest(run, point, null_test(run, path, core=rebuilt.restored_core(point.snapshot)))


def runs_to_leave(folder: Path, seeds: range) -> Iterator[Path]:
    """Golden traces, made runs with samples and turns, and random ones: in one file, in many, and without the first."""
    yield from (path for name in GOLDEN if not is_speculative(path := FOLDER / f"{name}.jsonl"))
    yield made_run(folder, 3, num_requests=30, num_blocks=40, max_num_seqs=3)
    for seed in seeds:
        path = record_random(folder, seed, segment_bytes=SEGMENT_BYTES if seed % 3 else 0)
        if not is_speculative(path):
            yield without_first_half(path) if seed % 3 == 2 else path


def seen_at(point: BranchPoint) -> Iterator[str]:
    """What is under way there."""
    state = point.state
    steps = [step for replica in state.replicas for step in replica.steps]
    yield from ("step in flight" for _ in steps)
    yield from ("chunk in flight" for step in steps if step.chunks)
    yield from ("timer" for _ in state.timers)
    yield from ("worker down" for replica in state.replicas if not replica.up)
    for request in state.requests:
        yield "samples" if request.arrival.n > 1 else "request"
        yield from (State(row.state).name for row in request.sequences)
        yield from ("preempted" for row in request.sequences if row.state is State.WAITING and row.residency)


def check_rests(folder: Path, seeds: range, count: int) -> Counter[str]:
    """All rests come out as recorded; what was under way where they begin."""
    chance, seen = random.Random(7), Counter[str]()
    for path in runs_to_leave(folder, seeds):
        for rest in rests_of(path, count, chance):
            assert rest.result.difference == "", f"{path} from event {rest.point.s}: {rest.result.difference}"
            seen.update(seen_at(rest.point))
            seen["points"] += 1
            seen["decisions"] += rest.result.num_decisions
            seen["in the middle of a run"] += rest.run.header.s > 0
    return seen


# It takes a few seconds to record the runs and to verify each up to its points.
def test_the_rest_of_a_run_is_repeated_from_any_drain(tmp_path: Path) -> None:
    seen = check_rests(tmp_path, range(64, 76), 2)
    assert seen["points"] >= 20
    wanted = {"step in flight", "chunk in flight", "samples", "WAITING_FOR_GRAMMAR", "WAITING", "CLOSING"}
    wanted |= {"in the middle of a run"}
    assert wanted <= {name for name, count in seen.items() if count}


@pytest.mark.soak
def test_the_rests_of_many_runs_are_repeated(tmp_path: Path) -> None:
    seen = check_rests(tmp_path, range(100), 4)
    assert seen["points"] >= 200
    wanted = {state.name for state in State if state is not State.FINISHED}
    wanted |= {"step in flight", "chunk in flight", "samples", "timer", "worker down", "preempted"}
    assert wanted <= {name for name, count in seen.items() if count}


def test_a_cancel_may_follow_the_last_token_of_a_sample_that_has_ended(tmp_path: Path) -> None:
    [request] = requests_of([0], output=30, n=2).requests
    outputs = [structs.replace(request.outputs[0], worker_end=5), request.outputs[0]]
    cancel = Cancel(index=0, position=5, delay_ns=MILLISECOND)
    request = structs.replace(request, outputs=outputs, cancel=cancel)
    path = run_of(tmp_path, Workload(source="made", requests=[request], block_size=16))
    results = [rest.result for rest in rests_of(path, 100, random.Random(1))]
    assert len(results) > 6
    assert [result.difference for result in results] == [""] * len(results)


def test_another_length_is_found_from_the_middle(tmp_path: Path) -> None:
    path = record_random(tmp_path, 2)
    run = read_run(path)
    point = find_point(path, BranchPlace(event=drain_ends(path)[20]))
    later = [index for index, request in enumerate(run.workload.requests) if request.s > point.s]
    index = next(index for index in later if run.workload.requests[index].outputs[0].reason == "length")
    request = run.workload.requests[index]
    shorter = structs.replace(request.outputs[0], worker_end=request.outputs[0].num_tokens - 1)
    run.workload.requests[index] = structs.replace(request, outputs=[shorter, *request.outputs[1:]])
    core = rebuild(run.header).restored_core(point.snapshot)
    assert null_test(run, path, core=core).difference.startswith("event ")
