"""Explanations: every nanosecond of every request of random workloads has one cause, and it is the log's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.events import Arrived, Preempted
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.explain.explainer import Explained, explain
from eventlm.replay.explain.result import IN_STEP, Explanation, parts
from eventlm.replay.explain.story import describe, part_rows
from eventlm.replay.simulate.engine import in_ranks
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from tests.replay.explained_logs import (
    OFTEN,
    Log,
    check_against_metrics,
    check_causes,
    check_steps,
    check_sums,
    moments,
    read,
    spans,
)
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.made_workloads import PREDICTOR, make_engine, make_workload
from tests.replay.workload_runs import SEGMENT_BYTES
from tests.simulation import Simulation
from tests.workload import Chaos

NUM_WORKLOADS = 60
PHASES = ("queue", "prefill", "decode", "preempted", "recompute", "text_end")
CAUSES = ("blocks", "sequence_limit", "token_budget", "head_of_line", "steps_in_flight", "trial", "worker", "paused")
CAUSES += (
    "draining",
    "grammar",
    "text_end",
    "step",
    "stage_wait",
    "other_step",
    "lost_step",
    "cut_step",
    "engine_down",
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random workloads of everything that may happen; one in five in many files."""
    folder = tmp_path_factory.mktemp("explained")
    paths = []
    for seed in range(NUM_WORKLOADS):
        with LogWriter(real_system(), folder, f"{seed}", segment_bytes=0 if seed % 5 else SEGMENT_BYTES) as writer:
            chaos = Chaos(recoveries=seed % 3)
            Simulation(seed, num_requests=10, writer=writer, chaos=chaos, check_every=0).run()
        paths.append(writer.run_folder)
    return paths


@pytest.fixture(scope="module")
def explained(logs: list[Path]) -> list[tuple[Log, Explained]]:
    return [(log, explain(log.path, log.requests)) for log in map(read, logs)]


def test_every_nanosecond_of_every_request_has_one_cause(explained: list[tuple[Log, Explained]]) -> None:
    causes: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for log, found in explained:
        assert found.warnings == []
        times, known = moments(log), spans(log)
        ended = {(each.request, each.index) for each in found.explanations if not each.outcome.startswith("rejected")}
        assert ended == log.rows.keys()
        for explanation in found.explanations:
            check_sums(explanation)
            check_causes(explanation, log, known, times)
            assert all(paragraph.endswith(".") for paragraph in describe(explanation))
            row = log.rows.get((explanation.request, explanation.index))
            if row is not None:
                check_against_metrics(explanation, row)
                if not explanation.preemptions:
                    check_steps(explanation, log)
            causes.update({interval.cause for interval in explanation.intervals})
            causes.update({interval.phase for interval in explanation.intervals})
            outcomes[explanation.outcome] += 1
    for name in (*PHASES, *CAUSES):
        assert causes[name] >= OFTEN, name
    for name in ("length", "eos", "stop", "complete", "cancelled", "deadline", "rejected: queue_full"):
        assert outcomes[name] >= OFTEN, name


def test_preemptions_are_those_of_the_log(explained: list[tuple[Log, Explained]]) -> None:
    num_ordered = num_unordered = 0
    for log, found in explained:
        told = {(each.request, each.index): each.preemptions for each in found.explanations}
        recorded: dict[tuple[int, int], list[Preempted]] = {}
        for event in log.events:
            if isinstance(event, Preempted):
                recorded.setdefault((event.request, event.index), []).append(event)
        for identity, events in recorded.items():
            assert [(p.at_ns, p.reason, p.by) for p in told[identity]] == [(e.ts, e.reason, e.by) for e in events]
        for preemption in (p for each in told.values() for p in each):
            if preemption.order is None:
                num_unordered += preemption.by is not None
                continue
            # Whoever took its place was more urgent.
            assert preemption.order.other == preemption.by
            assert preemption.order.other_urgency <= preemption.order.own_urgency
            num_ordered += 1
    # It is not known of one that was admitted and evicted in one drain.
    assert num_ordered >= max(OFTEN, 50 * num_unordered)


def alone_in(segment: Path, log: Log, whole: dict[tuple[int, int], Explanation]) -> list[Explanation]:
    """What a segment says of all that lived in it; of the one that ended last before it, it says that it has ended."""
    with LogReader(segment) as reader:
        events = [line.event() for line in reader]
    first, last = events[0], events[-1]
    ends: dict[int, int] = {}
    for (request, _), full in whole.items():
        ends[request] = max(ends.get(request, 0), full.end_ns)
    ended = [request for request, end_ns in ends.items() if end_ns <= first.ts]
    if ended:
        with pytest.raises(UsageError, match="ended before"):
            explain(segment, [(ended[-1], None)])
    later = next((request for request, _ in log.requests if request > last.s), None)
    if later is not None:
        with pytest.raises(UsageError, match="has no request"):
            explain(segment, [(later, None)])
    return explain(
        segment, [(request, None) for request in ends if request not in ended and request <= last.s]
    ).explanations


def test_a_later_segment_explains_its_part_in_the_same_way(logs: list[Path]) -> None:
    """Alone it does not know what came before it; how sequences ended it tells as the whole run does."""
    num_compared = 0
    for path in logs[::5]:
        log = read(path)
        whole = {(each.request, each.index): each for each in explain(path, log.requests).explanations}
        segment = sorted(path.glob("trace-*.jsonl"))[len(list(path.glob("trace-*.jsonl"))) // 2]
        with LogReader(segment) as reader:
            first_ns = reader.header.ts
        for part in alone_in(segment, log, whole):
            check_sums(part)
            full = whole[part.request, part.index]
            assert part.start_ns == full.start_ns
            if part.arrived_ns < first_ns:
                assert part.notes == ["its arrival is not in the log"]
                assert part.intervals[0].cause == "not_recorded"
            if part.outcome == full.outcome:
                assert part.end_ns == full.end_ns
                # What began before the segment may have another cause there.
                rest = [each for each in part.intervals if each.start_ns > first_ns][1:]
                known = {(each.start_ns, each.end_ns, each.phase, each.cause) for each in full.intervals}
                assert {(each.start_ns, each.end_ns, each.phase, each.cause) for each in rest} <= known
                num_compared += len(rest)
    assert num_compared > 15 * OFTEN


def test_a_request_is_explained_from_the_file_that_it_arrived_in(explained: list[tuple[Log, Explained]]) -> None:
    """Nothing but the numbers of lines that were read tells that the files before it were left out."""
    for log, found in explained[::5]:
        asked = log.requests[-1:] + log.requests[len(log.requests) // 2 :][:1]
        for request, _ in asked:
            alone = explain(log.path, [(request, None)])
            assert alone.explanations == [each for each in found.explanations if each.request == request]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces(name: str) -> None:
    log = read(FOLDER / f"{name}.jsonl")
    found = explain(log.path, log.requests)
    assert len(found.explanations) >= len(log.rows) > 5
    for explanation in found.explanations:
        check_sums(explanation)
        check_causes(explanation, log, spans(log), moments(log))


def explained_pipeline(stages: int, workload: Workload, folder: Path) -> tuple[Log, list[Explanation]]:
    """All of a simulated run on links that take their time."""
    setup = make_engine(num_blocks=24, pipeline_parallel_size=stages)
    cost = in_ranks(load_cost_model("a100-llama3-8b"), setup.config.parallel)
    log = read(Path(simulate(workload, setup, cost, predictor=PREDICTOR, record=folder).run_folder))
    return log, explain(log.path, log.requests).explanations


@pytest.mark.parametrize("stages", [2, 3])
def test_in_a_pipeline_a_step_is_in_a_stage_or_waits_for_one_or_is_on_its_way(stages: int, tmp_path: Path) -> None:
    log, explanations = explained_pipeline(stages, make_workload(7), tmp_path)
    times, known = moments(log), spans(log)
    causes: Counter[str] = Counter()
    for explanation in explanations:
        check_sums(explanation)
        check_causes(explanation, log, known, times)
        if not explanation.preemptions:
            check_steps(explanation, log)
        causes.update({interval.cause for interval in explanation.intervals})
        words = " ".join([*describe(explanation), *(row[0] for row in part_rows(explanation))])
        for cause, word in (("stage_wait", "waiting for a stage"), ("exchange", ": exchange")):
            assert (word in words) == any(interval.cause == cause for interval in explanation.intervals)
    assert min(causes[cause] for cause in IN_STEP) >= OFTEN


def test_a_request_alone_in_a_pipeline_takes_all_that_its_stages_and_links_take(tmp_path: Path) -> None:
    """Its prompt is one chunk, so no two steps are under way at a time."""
    arrival = Arrived(prompt_tokens=20, max_tokens=4, scheduling=SchedulingParams(model=""))
    request = WorkloadRequest(arrival=arrival, arrival_ns=0, outputs=[SequenceOutput()])
    log, (explanation,) = explained_pipeline(3, Workload(source="alone", requests=[request]), tmp_path)
    assert [each.num_tokens for each in explanation.steps] == [20, 0, 0, 0]
    (replica,) = trace_stats(log.path).snapshot.replicas
    sums: Counter[str] = Counter()
    for part in parts(explanation):
        sums[part.cause] += part.duration_ns
    assert sums["step"] == sum(replica.stage_busy_ns)
    assert sums["exchange"] == sum(replica.stage_exchange_ns) > 0
    assert sums["stage_wait"] == sum(replica.stage_wait_ns) == 0
