"""What-ifs about runs of several replicasets: of all of them, and of one while the other stays as it was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Finished, Header, PolicySwapped, WorkerLost, WorkerUp
from eventlm.replay.branch.branch import branch
from eventlm.replay.branch.point import BranchPlace, find_point
from eventlm.replay.rebuild import Changes, SetChanges
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative, build_engine, external_facts_of
from eventlm.replay.what_if.report import as_object, render
from eventlm.replay.what_if.what_if import WhatIfResult, what_if
from eventlm.replay.workload.recorded_run import RecordedRun, read_run
from tests.replay.branch_runs import drain_ends
from tests.replay.made_workloads import COST
from tests.replay.replicaset_runs import SLOW, made_sets, record_sets
from tests.replay.what_if_runs import events_of, metric_of

COSTS = {"main": COST, "small": SLOW}
SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_sets(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def run(path: Path) -> RecordedRun:
    return read_run(path)


def of_small(num_replicas: int | None = None, **changes: Any) -> Alternative:
    """Changes to the second replicaset."""
    of_sets = {"small": SetChanges(**changes)} if changes else {}
    replicas = {"small": num_replicas} if num_replicas is not None else {}
    return Alternative(changes=Changes(of_sets=of_sets), replicas_of_sets=replicas)


def test_with_their_own_cost_models_the_baseline_is_the_run(path: Path) -> None:
    found = what_if(path, [of_small(policy={"type": "lrs"})], cost_models=COSTS)
    assert found.null is not None
    assert found.null.num_decisions > 500
    for metric in found.comparison.metrics:
        assert metric.recorded == metric.baseline, metric.name
    assert [each.record.name for each in found.sets] == ["main", "small"]
    assert [[span.name for span in each.policies] for each in found.sets] == [["fcfs"], ["edf"]]


@pytest.fixture(scope="module")
def changed(path: Path, tmp_path_factory: pytest.TempPathFactory) -> WhatIfResult:
    alternatives = [of_small(1), of_small(1, policy={"type": "lrs"}, settings={"max_num_seqs": 3})]
    return what_if(path, alternatives, cost_models=COSTS, output=tmp_path_factory.mktemp("simulated"))


def test_what_changes_in_one_leaves_the_other_as_it_was(changed: WhatIfResult) -> None:
    """They share the core, and nothing else: a replica of the first has the same steps at the same times."""
    names = [metric.name for metric in changed.comparison.metrics]
    assert "ttft_p99_model_made" in names
    for name in names:
        if name.endswith("_model_made") and not name.startswith("output_tokens_per_second"):
            metric = metric_of(changed, name)
            assert [cell.value for cell in metric.alternatives] == [metric.baseline] * 2, name
    slower = metric_of(changed, "ttft_p50_model_other")
    assert all((cell.value or 0) > 1.2 * (slower.baseline or 0) for cell in slower.alternatives)


def test_the_trace_of_an_alternative_is_one_of_several_replicasets(changed: WhatIfResult) -> None:
    folder = changed.alternatives[1].run_folder
    assert verify(folder, check_invariants=True).exit_code == 0
    header = events_of(folder)[0]
    assert isinstance(header, Header)
    first, second = header.sets
    assert (first.core, first.plugins) == (changed.sets[0].record.core, changed.sets[0].record.plugins)
    assert (second.name, second.core.num_replicas, second.core.max_num_seqs) == ("small", 1, 3)
    assert next(each.name for each in second.plugins if each.kind == "policy") == "lrs"
    assert header.host["simulated"]["changes"] == "small: lrs, 1 replica, max_num_seqs=3"
    assert list(header.host["simulated"]["cost_models"]) == ["main", "small"]


def test_the_report_has_a_line_and_metrics_for_each(changed: WhatIfResult) -> None:
    text = render(changed)
    assert "recorded       main (made): policy fcfs" in text
    assert "small (other): policy edf" in text
    assert "cost model     main (made): as given" in text
    assert "\nTTFT p50, other " in text
    assert "Note: small: a step is taken to cost with 1 replica what it cost with 2" in " ".join(text.split())
    found = as_object(changed)
    assert [each["name"] for each in found["replicasets"]] == ["main", "small"]
    assert [each.name for each in changed.alternatives] == [
        "small: 1 replica",
        "small: lrs, 1 replica, max_num_seqs=3",
    ]


def test_what_is_for_all_is_for_each_and_its_own_goes_before_it(run: RecordedRun) -> None:
    changes = Changes(
        policy={"type": "lrs"}, settings={"max_num_seqs": 5}, of_sets={"small": SetChanges(policy={"type": "lpm"})}
    )
    engine = build_engine(run.header, Alternative(changes=changes, num_replicas=3, replicas_of_sets={"main": 4}))
    assert [each.core.num_replicas for each in engine.sets] == [4, 3]
    assert [each.core.max_num_seqs for each in engine.sets] == [5, 5]
    assert [each.plugins[0].name for each in engine.sets] == ["lrs", "lpm"]
    assert engine.alternative.describe() == "lrs, 3 replicas, max_num_seqs=5, small: lpm, main: 4 replicas"


def test_what_befell_a_replica_befalls_it_under_its_new_number(run: RecordedRun) -> None:
    facts = [
        WorkerUp(s=1, ts=1, replica=0, epoch=1),
        WorkerUp(s=2, ts=2, replica=1, epoch=1),
        WorkerUp(s=3, ts=3, replica=2, epoch=1),
        WorkerLost(s=9, ts=SECOND, replica=2, epoch=1),
        PolicySwapped(s=11, ts=2 * SECOND, name="edf"),
        PolicySwapped(s=12, ts=3 * SECOND, name="lrs", replicaset=1),
    ]
    run = structs.replace(run, external_facts=facts)

    def numbers(alternative: Alternative) -> list[tuple[type, int]]:
        found = external_facts_of(run, build_engine(run.header, alternative))
        return [(type(fact), getattr(fact, "replica", getattr(fact, "replicaset", -1))) for fact in found]

    swaps = [(PolicySwapped, -1), (PolicySwapped, 1)]
    ups = [(WorkerUp, number) for number in range(3)]
    assert numbers(Alternative()) == [*ups, (WorkerLost, 2), *swaps]
    # The second set's replicas move up by one, and one more of the first comes up with its own first.
    moved = [(WorkerUp, number) for number in (0, 1, 2, 3)]
    more = Alternative(replicas_of_sets={"main": 2})
    assert numbers(more) == [*moved, (WorkerLost, 3), *swaps]
    assert numbers(of_small(1)) == [*ups[:2], *swaps]
    assert numbers(of_small(policy={"type": "lpm"})) == [*ups, (WorkerLost, 2), (PolicySwapped, 0)]


def ask_and_branch(folder: Path, seed: int) -> None:
    """A change to one replicaset of a random run, from its start and from one of its drains; both verify."""
    path, chance = record_sets(folder, seed), random.Random(seed)
    with LogReader(path) as log:
        names = [each.name for each in log.header.sets]
        last_end = max(event.c for event in (line.event() for line in log) if isinstance(event, Finished))
    own = SetChanges(
        policy={"type": chance.choice(["fcfs", "edf", "lrs", "lpm"])},
        router={"type": chance.choice(["pull", "least_loaded", "prefix_affinity"])},
    )
    changes = Changes(batcher={"type": "dynamic"}, of_sets={chance.choice(names): own})
    alternative = Alternative(changes=changes, replicas_of_sets={chance.choice(names): chance.choice([1, 2, 4])})
    asked = what_if(path, [alternative], output=folder)
    # From the last end on there is nothing left to do.
    point = find_point(path, BranchPlace(event=chance.choice([s for s in drain_ends(path) if s < last_end])))
    branched = branch(path, point, changes, num_draws=1, output=folder)
    for found in (asked, branched.what_if):
        assert verify(found.alternatives[0].run_folder, check_invariants=True).exit_code == 0, seed


def test_a_random_run_is_asked_and_branched(tmp_path: Path) -> None:
    ask_and_branch(tmp_path, 5)


@pytest.mark.soak
def test_many_random_runs_are_asked_and_branched(tmp_path: Path) -> None:
    for seed in range(40):
        ask_and_branch(tmp_path, seed)


@pytest.mark.parametrize(
    ("alternative", "message"),
    [
        (
            Alternative(changes=Changes(of_sets={"smal": SetChanges()})),
            r"--replicaset smal: the run has no replicaset of this name, but main \(made\), small \(other\)",
        ),
        (Alternative(replicas_of_sets={"smal": 2}), "--replicaset smal: the run has no"),
        (of_small(0), "replicaset small: replicas: 0 replicas make no sense"),
        (of_small(1024), "up to 1,024"),
        (of_small(settings={"max_num_seqs": 0}), "replicaset small: --set: max_num_seqs=0"),
        (of_small(settings={"block_size": 4}), "replicaset small: --set block_size: .* recorded 8"),
        (of_small(settings={"max_num_batched_tokens": 7}), "replicaset small: --set: .* less than max_num_seqs 8"),
        (of_small(policy={"type": "nothing"}), "replicaset small: .*nothing"),
    ],
)
def test_mistakes_say_where(run: RecordedRun, alternative: Alternative, message: str) -> None:
    with pytest.raises(UsageError, match=message) as found:
        build_engine(run.header, alternative)
    assert "\n" not in str(found.value)
