"""What a sequence is said to have waited for is what kept the planner from running it.

Drains of random workloads are decided twice again by cores that lack nothing else: with the cause that was told in
place the sequence still does not run, without it it does. No part of the planner is written down here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import UNSET, structs

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.core.core import Core
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.step_plan import StepPlan, WaitCause, WaitReason
from eventlm.core.wait_reason import find_wait_reason
from eventlm.events import Arrived, Decision, Fact, Launched, Preempted, Routed
from eventlm.policies.fixed import Fixed
from eventlm.replay.explain.explainer import Explainer
from eventlm.replay.explain.result import Interval
from eventlm.replay.explain.timeline import Timeline
from eventlm.replay.rebuild import Rebuilt, rebuild
from eventlm.replay.verify.verifier import Verifier
from eventlm.system.system import real_system
from tests.core.rig import Rig
from tests.simulation import Simulation

NUM_WORKLOADS = 28
#: Each cause is tried at most so often in a workload.
MOST = 8
PLENTY = 10_000
#: What the planner decides by. `batcher` is left out: the random workloads hardly have it.
#: Of each the chance that it is tried where it comes up: some come up rarely.
CHANCES: dict[WaitCause, float] = {
    "sequence_limit": 0.05,
    "blocks": 0.05,
    "token_budget": 0.1,
    "head_of_line": 0.3,
    "trial": 1,
    "steps_in_flight": 1,
}


class Asked(NamedTuple):
    """What a timeline was told behind a drain."""

    sequence: Sequence
    wait_reason: WaitReason
    plans: dict[int, StepPlan]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    found: list[Asked] = []

    def ask(state: CoreState, sequence: Sequence, plans: Mapping[int, StepPlan]) -> WaitReason | None:
        wait_reason = find_wait_reason(state, sequence, plans)
        if wait_reason is not None:
            found.append(Asked(sequence, wait_reason, dict(state.plans)))
        return wait_reason

    monkeypatch.setattr("eventlm.core.wait_reason.find_wait_reason", ask)
    return found


def lacking_only(cause: WaitCause | None, rebuilt: Rebuilt, snapshot: bytes) -> Core:
    """The core of a snapshot with plenty of all but what a cause stands for (None: of all)."""
    limits: dict[str, Any] = {"max_num_seqs": PLENTY}
    taken = msgspec.json.decode(snapshot)
    [(config, plugins, _)] = rebuilt.sets
    slots = config.state_slots
    if slots is not UNSET:
        # Each that runs must have one.
        limits["state_slots"] = slots + 8 * PLENTY
        for replica in taken["replicas"]:
            replica["states"]["free"] += range(slots, slots + 8 * PLENTY)
    if cause == "sequence_limit":
        del limits["max_num_seqs"]
    if cause != "head_of_line":
        limits["max_skips"] = PLENTY
    if cause not in ("blocks", "head_of_line"):
        num_blocks = config.num_blocks
        limits["num_blocks"] = num_blocks + PLENTY
        for replica in taken["replicas"]:
            replica["pool"]["free"] = [*range(num_blocks, num_blocks + PLENTY), *replica["pool"]["free"]]
    if cause not in ("blocks", "head_of_line", "token_budget"):
        # With larger chunks more could be hit, and fewer blocks would be lacking.
        limits["max_num_batched_tokens"] = 100 * PLENTY
        plugins = structs.replace(plugins, batcher=Fixed())
    if cause != "trial":
        taken["suspects"] = []
        limits["max_losses"] = 0
    if cause is None or cause == "trial":
        limits["max_steps_in_flight"] = config.max_steps_in_flight + 1
        if config.stages > 1:
            limits["num_stages"] = config.stages + 1
        limits["run_ahead_ms"] = 0
    taken = msgspec.json.encode(taken)
    return Core.restored(structs.replace(config, **limits), plugins, taken, is_changed=True)


def runs(core: Core, facts: list[Fact], sequence: Sequence) -> tuple[bool, list[Decision]]:
    """Whether the drain of these facts leads to a step with the sequence; and what it decides."""
    decisions: list[Decision] = []
    for fact in facts:
        # In between it may have decided more or less than what was recorded.
        core.state.next_seq = fact.s
        decisions += core.apply(fact)
    return core.state.requests[sequence.request].sequences[sequence.index].in_flight > 0, decisions


def is_only_cause(found: Asked, config: Any) -> bool:
    """Whether the sequence would not run if it lacked nothing but what was told."""
    if found.sequence.home < 0 and config.num_replicas > 1:
        # Another replica, which lacks something else, would take it.
        return False
    # One that was looked at in this drain and did not fit may fit behind it, and waits for the next.
    return found.wait_reason.cause != "steps_in_flight" or found.wait_reason.replica not in found.plans


def read(folder: Path, seed: int) -> tuple[Rebuilt, Explainer, list[LogLine]]:
    with LogWriter(real_system(), folder, f"{seed}") as writer:
        Simulation(seed, num_requests=10, writer=writer, check_every=0).run()
    with LogReader(writer.run_folder) as reader:
        rebuilt = rebuild(reader.header)
        lines = list(reader.lines_from(0))
        requests = {line.s: None for line in lines if line.tag == Arrived.__struct_config__.tag}
        return rebuilt, Explainer(Verifier(rebuilt, reader.header), requests), lines


def watched(rig: Rig, request: int) -> Timeline:
    """A timeline from the arrival on, which was in the latest drain."""
    timeline = Timeline(rig.sequence(request), rig.state)
    timeline.arrive()
    return look(rig, timeline)


def look(rig: Rig, timeline: Timeline) -> Timeline:
    """Let a timeline, of one that waits, look at the latest drain."""
    for launched in rig.of(Launched):
        timeline.launch(launched, None)
    timeline.settle(rig.state)
    return timeline


def waited_for(timeline: Timeline, rig: Rig, cause: WaitCause) -> Interval:
    """The only interval in the queue with this cause."""
    (found,) = [each for each in timeline.cut(rig.now_ns, "unfinished").intervals if each.cause == cause]
    assert found.phase == "queue"
    return found


def test_a_later_arrival_that_was_ahead_is_noted_in_place_of_an_earlier_one() -> None:
    rig = Rig(max_num_seqs=1)
    rig.arrive(4, 2)
    earlier = rig.arrive(4, 2)
    timeline = watched(rig, rig.arrive(4, 1, priority=1))
    rig.complete()
    look(rig, timeline)
    later = rig.arrive(4, 1)
    look(rig, timeline)
    for _ in range(2):
        rig.complete()
        assert rig.sequence(earlier).resident
        look(rig, timeline)
    waited = waited_for(timeline, rig, "sequence_limit")
    assert waited.order is not None
    assert (waited.order.other, waited.order.other_urgency[0], waited.order.own_urgency[0]) == ((later, 0), 0, 1)


@pytest.mark.parametrize(("run_ahead_ms", "limit"), [(0, 2), (1, 1)])
def test_how_many_steps_were_in_flight_of_how_many_that_may_be(run_ahead_ms: int, limit: int) -> None:
    rig = Rig(max_steps_in_flight=2, max_decodes_in_flight_per_seq=2, run_ahead_ms=run_ahead_ms)
    rig.arrive(4, 8)
    timeline = watched(rig, rig.arrive(4, 4))
    rig.arrive(4, 4)
    look(rig, timeline)
    (waited,) = [each for each in timeline.cut(rig.now_ns, "unfinished").intervals if each.phase == "queue"]
    assert (waited.cause, waited.limit, len(waited.steps)) == ("steps_in_flight", limit, limit)


def test_the_most_blocks_that_were_lacking_are_noted() -> None:
    rig = Rig(num_blocks=12, max_model_len=44)
    rig.arrive(28, 12)
    timeline = watched(rig, rig.arrive(16, 4))
    for _ in range(6):
        rig.complete()
        look(rig, timeline)
    # It needs 5 of 12 blocks; the other one began with 8 and has taken one more.
    assert waited_for(timeline, rig, "blocks").num_lacking == 2


def test_without_its_cause_a_sequence_runs_and_with_nothing_but_its_cause_it_does_not(
    asked: list[Asked], tmp_path: Path
) -> None:
    num_lifted: Counter[str] = Counter()
    num_kept: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        rng = random.Random(seed)
        rebuilt, explainer, lines = read(tmp_path, seed)
        if rebuilt.sets[0].config.groups > 1:
            # With more blocks, those of all groups but the first would have other numbers.
            continue
        core = explainer._verifier.core
        tried: Counter[str] = Counter()
        snapshot, drain = b"", list[Fact]()
        for line in lines:
            event = line.event()
            asked.clear()
            if not isinstance(event, Fact):
                explainer.feed(line)
                continue
            if not core.state.drain_open:
                snapshot, drain = core.snapshot(), []
            drain.append(event)
            explainer.feed(line)
            for found in asked:
                cause = found.wait_reason.cause
                if tried[cause] >= MOST or rng.random() >= CHANCES.get(cause, 0):
                    continue
                tried[cause] += 1
                does_run, _ = runs(lacking_only(None, rebuilt, snapshot), drain, found.sequence)
                assert does_run, (seed, line.s, found)
                num_lifted[cause] += 1
                if not is_only_cause(found, rebuilt.sets[0].config):
                    continue
                does_run, decisions = runs(lacking_only(cause, rebuilt, snapshot), drain, found.sequence)
                # With other limits others may be preempted or sent elsewhere, which gives it what it lacked.
                if not any(isinstance(decision, Preempted | Routed) for decision in decisions):
                    assert not does_run, (seed, line.s, found)
                    num_kept[cause] += 1
    for cause in CHANCES:
        assert min(num_lifted[cause], num_kept[cause]) >= 5, (cause, num_lifted, num_kept)
