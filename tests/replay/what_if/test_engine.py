"""Alternatives: their names, their engines, what befalls these, and what their traces say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.events import Fact, Paused, PolicySwapped, PredictorSwapped, Recovered, Resumed, WorkerLost, WorkerUp
from eventlm.replay.rebuild import Changes
from eventlm.replay.what_if.engine import Alternative, build_engine, external_facts_of, names
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from eventlm.system.system import real_system
from tests.replay.traces import CALM, small_machine
from tests.replay.what_if_runs import MILLISECOND, policy, requests_of, run_of
from tests.simulation import Simulation

SECOND = 1_000_000_000
EXTERNAL_FACTS: list[Fact] = [
    WorkerUp(s=1, ts=5, replica=0, epoch=1),
    WorkerUp(s=2, ts=6, replica=1, epoch=1),
    PolicySwapped(s=20, ts=2 * SECOND, c=17, name="fcfs"),
    WorkerLost(s=40, ts=4 * SECOND, c=39, replica=1, epoch=1),
    WorkerUp(s=50, ts=5 * SECOND, replica=1, epoch=2),
    Paused(s=60, ts=6 * SECOND),
    PredictorSwapped(s=70, ts=8 * SECOND, coefficients=[1, 1, 1, 1, 1]),
    Resumed(s=80, ts=9 * SECOND),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Two replicas, of which one dies and one is replaced; the first request comes after a tenth of a second."""
    path = run_of(tmp_path_factory.mktemp("runs"), requests_of([100, 200]), replicas=2)
    return structs.replace(read_run(path), external_facts=EXTERNAL_FACTS)


def befalls(run: RecordedRun, alternative: Alternative) -> list[Fact]:
    found = external_facts_of(run, build_engine(run.header, alternative))
    assert all(fact.c == 0 for fact in found)
    return found


def test_what_alternatives_have_in_common_is_not_in_their_names() -> None:
    settings = Changes(policy={"type": "edf"}, settings={"num_blocks": 40})
    pair = [Alternative(changes=settings), Alternative(changes=structs.replace(settings, policy={"type": "lrs"}))]
    assert names(pair) == ["edf", "lrs"]
    assert names(pair[:1]) == ["edf, num_blocks=40"]
    assert names([*pair, Alternative(num_replicas=2)]) == ["edf, num_blocks=40", "lrs, num_blocks=40", "2 replicas"]
    assert names([policy("edf"), policy("edf")]) == ["edf (1)", "edf (2)"]
    assert names([Alternative()]) == ["as recorded"]
    assert names([]) == []


def test_what_befell_the_run_befalls_the_alternative(run: RecordedRun) -> None:
    assert befalls(run, Alternative()) == [structs.replace(fact, c=0) for fact in EXTERNAL_FACTS]


def test_another_policy_is_not_swapped(run: RecordedRun) -> None:
    found = befalls(run, policy("edf"))
    assert [type(fact) for fact in found] == [
        type(fact) for fact in EXTERNAL_FACTS if not isinstance(fact, PolicySwapped)
    ]
    assert any(isinstance(fact, PolicySwapped) for fact in befalls(run, Alternative(num_replicas=3)))


def test_further_replicas_come_up_again_after_a_recovery(run: RecordedRun) -> None:
    died = [Recovered(s=90, ts=10 * SECOND), WorkerUp(s=91, ts=11 * SECOND, replica=0, epoch=2)]
    found = befalls(structs.replace(run, external_facts=[*EXTERNAL_FACTS, *died]), Alternative(num_replicas=3))
    ups = [fact for fact in found if isinstance(fact, WorkerUp) and fact.replica == 2]
    assert [(up.ts, up.epoch) for up in ups] == [(5, 1), (11 * SECOND, 2)]


def test_nothing_is_computed_while_there_is_no_engine(run: RecordedRun) -> None:
    died = Recovered(s=90, ts=10 * SECOND, down_ns=3 * SECOND)
    found = befalls(structs.replace(run, external_facts=[*EXTERNAL_FACTS, died]), Alternative())
    assert [fact.ts for fact in found if isinstance(fact, Recovered)] == [7 * SECOND]


def test_replicas_come_and_go(run: RecordedRun) -> None:
    one = befalls(run, Alternative(num_replicas=1))
    assert {fact.replica for fact in one if isinstance(fact, WorkerUp | WorkerLost)} == {0}
    four = [fact for fact in befalls(run, Alternative(num_replicas=4)) if isinstance(fact, WorkerUp)]
    assert [(up.ts, up.replica, up.epoch) for up in four] == [
        (5, 0, 1),
        (5, 2, 1),
        (5, 3, 1),
        (6, 1, 1),
        (5 * SECOND, 1, 2),
    ]


def test_external_facts_keep_their_place_in_the_load_and_take_as_long(run: RecordedRun) -> None:
    first_ns = run.workload.requests[0].arrival_ns
    found = befalls(run, Alternative(speed_up_ppm=2_000_000))

    def halved(ns: int) -> int:
        return first_ns + (ns - first_ns) // 2

    lost_ns, paused_ns = halved(4 * SECOND), halved(6 * SECOND)
    assert [fact.ts for fact in found] == [
        5,
        6,
        halved(2 * SECOND),
        lost_ns,
        # A worker starts no faster, and an operator is no quicker.
        lost_ns + SECOND,
        paused_ns,
        halved(8 * SECOND),
        paused_ns + 3 * SECOND,
    ]


def test_the_engine_is_the_recorded_one_with_the_changes(run: RecordedRun) -> None:
    changes = Changes(policy={"type": "lrs", "multiplier": 3}, settings={"max_num_seqs": 4})
    engine = build_engine(run.header, Alternative(changes=changes, num_replicas=5))
    assert engine.sets[0].core == structs.replace(run.header.core, max_num_seqs=4, num_replicas=5)
    assert [record.name for record in engine.sets[0].plugins] == ["lrs", "fixed", "pull"]
    assert engine.sets[0].plugins[0].parameters["multiplier"] == 3
    assert build_engine(run.header, Alternative()).sets[0].plugins == run.header.plugins
    assert build_engine(run.header, Alternative()).notes == []


@pytest.mark.parametrize(
    ("alternative", "message"),
    [
        (Alternative(num_replicas=0), "0 replicas make no sense"),
        (Alternative(num_replicas=1025), "an engine has 1 to 1024"),
        (Alternative(speed_up_ppm=0), "sped up by 0"),
        (Alternative(closed_loop=-1), "closed loop of -1"),
        (Alternative(changes=Changes(settings={"num_blocks": 0})), "num_blocks=0"),
        (Alternative(changes=Changes(settings={"num_blocks": 10**12})), "expected `int` <= 16777216"),
        (Alternative(changes=Changes(settings={"num_blocks": 1 << 23}), num_replicas=3), "--replicas: 3 replicas of"),
        (Alternative(changes=Changes(settings={"max_model_len": 10**9})), "blocks of 16 hold"),
        (Alternative(changes=Changes(settings={"models": ["x"]})), "--set models"),
        (Alternative(changes=Changes(settings={"max_num_batched_tokens": 7})), "less than max_num_seqs 8"),
        (policy("edff"), "did you mean edf"),
    ],
)
def test_alternatives_that_make_no_sense_are_refused(run: RecordedRun, alternative: Alternative, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_engine(run.header, alternative)


def test_a_limit_that_a_run_had_may_go_on(run: RecordedRun) -> None:
    core = structs.replace(run.header.core, max_num_batched_tokens=4, max_num_seqs=8)
    header = structs.replace(run.header, core=core)
    assert build_engine(header, policy("edf")).sets[0].core == core


def test_a_log_that_begins_in_the_middle_begins_with_the_engine_as_it_was(tmp_path: Path) -> None:
    machine = small_machine({"type": "edf"}, num_replicas=2)
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=4096) as writer:
        simulation = Simulation(1, num_requests=60, machine=machine, chaos=CALM, writer=writer, check_every=0)
        simulation.at(1 * MILLISECOND, lambda: simulation.engine_core.put_fact(PolicySwapped(name="lrs")))
        simulation.at(
            2 * MILLISECOND, lambda: simulation.engine_core.put_fact(PredictorSwapped(coefficients=[7, 7, 7, 7, 7]))
        )
        simulation.at(150 * MILLISECOND, lambda: simulation.workers[1].kill())
        simulation.run()
    segments = [read_run(path) for path in sorted(writer.run_folder.glob("trace-*.jsonl"))[1:]]
    seen_down = False
    for later in segments:
        assert later.start is not None
        found = [fact for fact in befalls(later, Alternative()) if fact.ts == later.header.ts]
        assert [fact.name for fact in found if isinstance(fact, PolicySwapped)] == ["lrs"]
        assert [fact.coefficients for fact in found if isinstance(fact, PredictorSwapped)] == [[7, 7, 7, 7, 7]]
        ups = [(fact.replica, fact.epoch) for fact in found if isinstance(fact, WorkerUp)]
        was_up = [(index, replica.epoch) for index, replica in enumerate(later.start.replicas) if replica.up]
        assert ups == was_up
        seen_down = seen_down or len(ups) == 1
    assert seen_down
