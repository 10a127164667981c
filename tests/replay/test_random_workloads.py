"""Random workloads of everything that may happen: they end, they are right, and they verify whatever the hash seed.

While a workload is recorded its state is validated after every event, nobody may wait while nothing is under way
(after every marked fact), its evictions stay within their bounds (`tests.bounds`), and every sequence ends as its
request says, whatever happened meanwhile. A workload is (seed, commit): a failure names the seed.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.core import scheduler
from eventlm.core.core import Core
from eventlm.core.shards import Layout
from eventlm.events import Launched, Preempted, WorkerLost
from eventlm.events.codec import DECISION_TAGS
from tests.replay.workload_runs import ALL_TAGS, in_processes
from tests.simulation import Simulation
from tests.workload import BATCHERS, MILLISECOND, POLICIES, ROUTERS, Chaos, Outcome, draw_machine

pytestmark = pytest.mark.long

#: One with each combination of plug-ins. The first ten have few withdrawals and deaths; the soak test runs those that
#: follow.
FIRST, NUM_WORKLOADS = 10, 48
NUM_RECORDED_AGAIN = 10
NUM_DELAYED = 9
#: In two of them a step that launches nothing preempts somebody, and then there is room for another.
PLANNED_AGAIN = (33, 48)
NUM_SOAKED = 20_000
SOAK_BATCH = 500

#: Tags that nobody sees here: a header comes before its readers, no record is lost, no plug-in fails, nobody profiles.
UNSEEN = {"header", "gap", "mark", "ops", "policy_failed", "plugin_failed"}


class Recorded(NamedTuple):
    """Where the traces are, and how often each event, reason and outcome occurred in them."""

    folder: Path
    counts: Counter[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("workloads")
    yield Recorded(folder, in_processes("record", folder, FIRST, FIRST + NUM_WORKLOADS, hash_seed=0))
    shutil.rmtree(folder)


def test_workloads_end_as_they_must_within_all_invariants(recorded: Recorded) -> None:
    # The recording raised nothing; this says that it was worth something.
    counts = recorded.counts
    assert counts["end"] == NUM_WORKLOADS
    assert counts.keys() >= ALL_TAGS - UNSEEN
    for often in ("preempt memory", "preempt admission", "preempt lost", "reject queue_full", "stop", "eos", "length"):
        assert counts[often] > 50, often
    for seldom in ("cancelled", "deadline", "front_end_lost", "error", "complete", "grammar", "stop_token"):
        assert counts[seldom] > 25, seldom


def test_workloads_verify_under_another_hash_seed(recorded: Recorded) -> None:
    counts = in_processes("verify", recorded.folder, FIRST, FIRST + NUM_WORKLOADS, hash_seed=1)
    assert counts["decisions verified"] == sum(recorded.counts[tag] for tag in DECISION_TAGS)
    assert counts["checkpoints"] == recorded.counts["checkpoint"]
    assert counts["segments"] == NUM_WORKLOADS + recorded.counts["snapshot"] > 2 * NUM_WORKLOADS


def test_recording_again_under_another_hash_seed_gives_the_same_bytes(recorded: Recorded, tmp_path: Path) -> None:
    in_processes("record", tmp_path, FIRST, FIRST + NUM_RECORDED_AGAIN, hash_seed=3)
    for seed in range(FIRST, FIRST + NUM_RECORDED_AGAIN):
        for trace in (recorded.folder / f"seed-{seed}").iterdir():
            assert (tmp_path / trace.parent.name / trace.name).read_bytes() == trace.read_bytes(), trace


def test_every_combination_of_plugins_comes_up() -> None:
    import random

    seen = set()
    for seed in range(60):
        machine = draw_machine(random.Random(seed), seed)
        seen.add((machine.policies[0]["type"], machine.batcher["type"], machine.router["type"]))
    assert seen == {(policy, batcher, router) for policy in POLICIES for batcher in BATCHERS for router in ROUTERS}


def test_layouts_and_deaths_of_all_their_ranks_come_up(recorded: Recorded) -> None:
    num_sets, micro_batches, layouts = set(), set(), set()
    #: Of how many stages and groups which was lost, and whether it had a step in hand.
    stages, groups, had_steps = set(), set(), set()
    for folder in recorded.folder.iterdir():
        with LogReader(folder) as reader:
            cores = [each.core for each in reader.header.sets]
            num_sets.add(len(cores))
            micro_batches |= {core.micro_batches or 0 for core in cores}
            by_replica = [Layout(stages=core.stages, groups=core.groups) for core in reader.header.cores_of_replicas()]
            layouts |= {(layout.stages > 1, layout.groups > 1) for layout in by_replica}
            for event in (line.event() for line in reader if line.tag == "worker_lost"):
                assert isinstance(event, WorkerLost)
                layout = by_replica[event.replica]
                if layout.num_ranks > 1:
                    place = layout.place_of(event.rank)
                    stages.add((layout.stages, place.stage))
                    groups.add((layout.groups, place.group))
                    had_steps.add(event.step >= 0)
    assert num_sets == {1, 2, 3}
    assert micro_batches == {0, 1, 2, 3, 5}
    assert len(layouts) == 4
    assert stages >= {(size, stage) for size in (2, 3, 4) for stage in range(size)}
    assert groups >= {(size, group) for size in (2, 3) for group in range(size)}
    assert had_steps == {True, False}


def test_no_sequence_could_run_where_a_plan_has_ended() -> None:
    num_asked = 0
    for seed in range(*PLANNED_AGAIN):
        simulation = Simulation(seed, check_every=0)
        core = simulation.engine_core.core
        apply = core.apply

        def plan_again(event: Any, *, core: Core = core, apply: Any = apply, seed: int = seed) -> Any:
            nonlocal num_asked
            decisions = apply(event)
            if getattr(event, "p", 0):
                copy = Core.restored(
                    core.state.replicasets[0].config, core.state.replicasets[0].plugins, core.snapshot()
                ).state
                for replicaset in copy.replicasets:
                    replicaset.note_all()
                scheduler.plan(copy)
                more = [each for each in copy.decisions if isinstance(each, Launched | Preempted)]
                assert more == [], f"workload {seed}, event {event.s}"
                num_asked += 1
            return decisions

        core.apply = plan_again  # type: ignore[method-assign]
        simulation.run()
    assert num_asked > 1000


def test_results_do_not_depend_on_when_the_edge_looked_at_the_text() -> None:
    num_stopped = 0
    for seed in range(NUM_DELAYED):
        at_once, late, later = (_outcomes(seed, delay, draw) for delay, draw in ((0, 0), (20, 1), (40, 2)))
        assert at_once == late == later, f"workload {seed}"
        num_stopped += sum(outcome.reason == "stop" for outcome in at_once.values())
    assert num_stopped > NUM_DELAYED


def _outcomes(seed: int, max_delay_ms: int, delay_seed: int) -> dict[tuple[int, int], Outcome]:
    """Of a workload without what depends on time by its nature: cancels, deadlines, full queues, drawn seeds."""
    chaos = Chaos(
        cancels=0,
        kills=0,
        drops_if_late=0,
        unseeded=0,
        bad_grammars=0,
        text_ends=0.8,
        poison_ppm=0,
        max_text_delay_ns=max_delay_ms * MILLISECOND,
    )
    return Simulation(seed, chaos=chaos, max_queue_len=10_000, text_delay_seed=delay_seed, check_every=0).run()


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_many_more_and_larger_workloads(tmp_path: Path) -> None:
    # One in ten is large; of those the state is validated after every tenth event.
    for first in range(0, NUM_SOAKED, SOAK_BATCH):
        seeds = (FIRST + NUM_WORKLOADS + first, FIRST + NUM_WORKLOADS + first + SOAK_BATCH)
        folder = tmp_path / f"{first}"
        in_processes("record", folder, *seeds, hash_seed=first, kind="" if first % (10 * SOAK_BATCH) else "--large")
        in_processes("verify", folder, *seeds, hash_seed=first + 1)
        shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_events_with_state_slots(tmp_path: Path) -> None:
    # Beside what the others say: every token follows from the state that its row was given (`FakeStates`).
    num_events, first = 0, 0
    while num_events < 1_000_000:
        seeds, folder = (first, first + SOAK_BATCH // 5), tmp_path / f"{first}"
        counts = in_processes("record", folder, *seeds, hash_seed=first, kind="--states")
        in_processes("verify", folder, *seeds, hash_seed=first + 1)
        shutil.rmtree(folder)
        num_events += sum(counts[tag] for tag in ALL_TAGS)
        first = seeds[1]
        print(f"{num_events:,} events of {first} workloads")
