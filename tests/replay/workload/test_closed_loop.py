"""Runs whose arrivals wait for ends are told from those that come by themselves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.events import Arrived
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import what_if
from eventlm.replay.workload.closed_loop import ClosedLoop, find_closed_loop
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.workload import SequenceOutput, Workload
from tests.replay.made_workloads import COST, MILLISECOND, PREDICTOR, make_engine
from tests.replay.what_if_runs import arrivals_of, metric_of, policy, requests_of, run_of


def varied(count: int, seed: int = 1) -> Workload:
    """Requests that are all there at the beginning, with lengths of their own."""
    chance = random.Random(seed)
    made = requests_of([0] * count, output=40)
    requests = []
    for request in made.requests:
        length = chance.randrange(2, 40)
        requests.append(structs.replace(request, outputs=[SequenceOutput(worker_end=length, num_tokens=length)]))
    return structs.replace(made, requests=requests)


def closed_run(folder: Path, num_clients: int, *, count: int = 120, **options: int) -> Path:
    """A run of so many clients."""
    found = simulate(
        varied(count), make_engine(**options), COST, predictor=PREDICTOR, closed_loop=num_clients, record=folder
    )
    return Path(found.run_folder)


def find(path: Path) -> ClosedLoop | None:
    run = read_run(path)
    return find_closed_loop(run.workload, run.ends_ns, num_rejected=run.num_rejected)


@pytest.mark.parametrize("num_clients", [1, 3, 8, 20])
def test_a_closed_loop_is_found(tmp_path: Path, num_clients: int) -> None:
    found = find(closed_run(tmp_path, num_clients))
    assert found is not None
    assert found.num_clients == num_clients
    assert max(found.pauses_ns) < MILLISECOND


@pytest.mark.parametrize("rate", [5, 20, 60, 200])
def test_poisson_arrivals_are_none_whatever_the_load(tmp_path: Path, rate: int) -> None:
    chance = random.Random(rate)
    now_ms, times = 0.0, []
    for _ in range(150):
        now_ms += chance.expovariate(rate) * 1000
        times.append(now_ms)
    requests = varied(150).requests
    made = [structs.replace(each, arrival_ns=round(ms * MILLISECOND)) for each, ms in zip(requests, times, strict=True)]
    assert find(run_of(tmp_path, structs.replace(varied(150), requests=made), max_queue_len=8)) is None


def test_neither_a_burst_nor_a_few_requests_are_a_loop(tmp_path: Path) -> None:
    assert find(run_of(tmp_path / "burst", varied(60))) is None
    assert find(closed_run(tmp_path / "few", 3, count=12)) is None


def test_a_full_queue_that_turns_requests_away_is_no_loop(tmp_path: Path) -> None:
    """As many requests are under way all the time."""
    times = [index * 2.0 for index in range(400)]
    path = run_of(tmp_path, requests_of(times, output=30), max_queue_len=2, max_num_seqs=2)
    run = read_run(path)
    assert run.num_rejected > 100
    assert find(path) is None


def test_turns_of_conversations_are_no_loop() -> None:
    """The workload ties them to each other already."""
    made = requests_of([index * 10.0 for index in range(80)])
    turns = [structs.replace(each, parent=index - 2) if index > 1 else each for index, each in enumerate(made.requests)]
    ends = [(index + 2) * 10 * MILLISECOND for index in range(80)]
    assert find_closed_loop(made, ends, num_rejected=0) == ClosedLoop(2, [0] * 78)
    assert find_closed_loop(structs.replace(made, requests=turns), ends, num_rejected=0) is None


def test_the_pauses_between_an_end_and_the_next_request_are_measured() -> None:
    made = requests_of([index * 10.0 for index in range(80)])
    for busy_ms, found in ((4, None), (9, ClosedLoop(1, [MILLISECOND] * 79))):
        ends = [(index * 10 + busy_ms) * MILLISECOND for index in range(80)]
        assert find_closed_loop(made, ends, num_rejected=0) == found


def test_each_seed_gives_the_pauses_another_order() -> None:
    loop = ClosedLoop(2, list(range(20)))
    assert loop.shuffled(0) == list(range(20))
    orders = [loop.shuffled(seed) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert loop.shuffled(2) == orders[2]


def test_a_what_if_names_the_flag_and_with_it_compares_like_with_like(tmp_path: Path) -> None:
    run = closed_run(tmp_path, 6, max_num_seqs=4)
    open_loop = what_if(run, [policy("lrs")], cost_model=COST)
    assert open_loop.closed_loop is not None
    assert any("--closed-loop 6" in note for note in open_loop.notes)
    faster = Alternative(changes=policy("fcfs").changes, closed_loop=6, num_replicas=2)
    result = what_if(run, [faster], cost_model=COST, output=tmp_path / "out")
    assert not any("--closed-loop" in note or "recorded load" in note for note in result.notes)
    rate = metric_of(result, "requests_per_second")
    assert rate.recorded == rate.baseline
    assert (rate.alternatives[0].value or 0) > 1.2 * (rate.recorded or 0)
    # At the recorded times it cannot be seen that the second replica serves more.
    at_times = metric_of(what_if(run, [Alternative(num_replicas=2)], cost_model=COST), "requests_per_second")
    assert (at_times.alternatives[0].value or 0) < 1.1 * (rate.recorded or 0)
    assert len(arrivals_of(result.alternatives[0].run_folder)) == 120
    assert all(isinstance(each, Arrived) for each in arrivals_of(run))
