"""Perfetto files, decoded with Perfetto's own protobufs: slices nest, flows resolve, nothing is left out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.events import Header, Launched, StepCompleted
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.export.perfetto import PerfettoWriter
from eventlm.replay.export.timeline import export_timeline
from eventlm.replay.simulate.engine import in_ranks
from eventlm.replay.simulate.simulation import simulate
from eventlm.telemetry.phases import TracedStep
from eventlm.types import TimeWindow
from tests.replay.export.decoded_perfetto import Decoded, Slice
from tests.replay.golden import FOLDER
from tests.replay.made_workloads import PREDICTOR, make_engine, make_workload
from tests.replay.traces import tampered
from tests.replay.workload_runs import record
from tests.telemetry.test_phases import Recorder, folded

PHASES = ("edge", "queue", "prefill", "decode", "preempted", "recompute", "text_end")


@pytest.fixture(scope="module", params=["edf_tight", "lrs_dying_workers", "fcfs_recurrent", "many segments"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoded, Recorder]:
    folder = tmp_path_factory.mktemp("perfetto")
    path = FOLDER / f"{request.param}.jsonl"
    if not path.exists():
        record(folder, 10)
        path = folder / "seed-10"
    export_timeline(path, folder / "run.pftrace", to="perfetto")
    return Decoded(folder / "run.pftrace"), folded(path)


def of_requests(decoded: Decoded) -> dict[tuple[int, int], Slice]:
    outer = [each for each in decoded.slices if "/lane " in each.track and not each.parent]
    found = {(int(each.args["request"]), int(each.args["index"])): each for each in outer}
    assert len(found) == len(outer)
    return found


def test_every_sequence_is_a_slice_with_its_phases_in_it(exported: tuple[Decoded, Recorder]) -> None:
    decoded, recorder = exported
    sequences = of_requests(decoded)
    assert sequences.keys() == recorder.outcomes.keys()
    for identity, found in sequences.items():
        assert (found.args["outcome"], found.end_ns) == recorder.outcomes[identity]
        assert found.start_ns == recorder.starts[identity]
        phases = [
            (each.name, each.start_ns, each.end_ns)
            for each in decoded.slices
            if each.track == found.track and each.name in PHASES and each.parent == found.name
        ]
        assert phases == recorder.phases[identity]


def test_slices_of_a_track_nest(exported: tuple[Decoded, Recorder]) -> None:
    decoded, recorder = exported
    by_track: dict[str, list[Slice]] = {}
    for each in decoded.slices:
        assert each.start_ns <= each.end_ns
        by_track.setdefault(each.track, []).append(each)
    for slices in by_track.values():
        around: list[Slice] = []
        for each in slices:
            while around and around[-1].name != each.parent:
                around.pop()
            assert not around or around[-1].start_ns <= each.start_ns <= each.end_ns <= around[-1].end_ns
            around.append(each)
    chunks = [each for each in decoded.slices if each.name == "chunk"]
    assert len(chunks) == sum(map(len, recorder.chunks.values()))
    assert {each.parent for each in chunks} <= {"prefill", "recompute"}


def test_every_step_is_a_slice_of_its_replica(exported: tuple[Decoded, Recorder]) -> None:
    decoded, recorder = exported
    steps = {each.args["event"]: each for each in decoded.slices if each.name.endswith(" step")}
    assert steps.keys() == {step.launched.s for step in recorder.steps}
    for launched, fact, *_ in recorder.steps:
        found = steps[launched.s]
        assert found.track.startswith(f"replica {launched.replica}/steps")
        assert (found.start_ns, found.end_ns) == (fact.start_ns, fact.end_ns)
        rows = len(launched.chunks) + len(launched.decodes)
        expected = {"step": launched.step, "rows": rows, "tokens": launched.num_tokens}
        assert found.args == found.args | expected | {"predicted_ns": launched.predicted_ns}
        assert found.name == f"{_kind(launched)} step"


def test_every_stage_has_a_track_of_its_replica(tmp_path: Path) -> None:
    """Their steps do not overlap. What a step took from stage to stage, it waited or was on its way."""
    setup = make_engine(num_blocks=24, pipeline_parallel_size=3, replicas=2)
    cost = in_ranks(load_cost_model("a100-llama3-8b"), setup.config.parallel)
    run = simulate(make_workload(7), setup, cost, predictor=PREDICTOR, record=tmp_path).run_folder
    export_timeline(run, tmp_path / "run.pftrace", to="perfetto")
    slices = [each for each in Decoded(tmp_path / "run.pftrace").slices if "/stage " in each.track]
    steps: dict[tuple[str, int], list[Slice]] = {}
    for each in slices:
        assert not each.parent
        if each.name == "step":
            steps.setdefault((each.track.partition("/")[0], int(each.args["step"])), []).append(each)
    ways = {(each.track, each.args["step"]): each.end_ns - each.start_ns for each in slices if each.name == "exchange"}
    with LogReader(run) as reader:
        facts = [event for event in (line.event() for line in reader) if isinstance(event, StepCompleted)]
    assert len(steps) == len(facts) > 50
    for fact in facts:
        found = steps[f"replica {fact.replica}", fact.step]
        assert [(each.start_ns, each.end_ns) for each in found] == fact.stages
        assert [each.track for each in found] == [f"replica {fact.replica}/stage {stage}" for stage in range(3)]
        for before, each in pairwise(found):
            way_ns = ways[each.track, fact.step]
            assert before.end_ns + int(each.args["waited_ns"]) + way_ns == each.start_ns
    assert any(each.args["waited_ns"] for found in steps.values() for each in found)
    assert len(ways) == 2 * len(facts)


def _kind(launched: Launched) -> str:
    return "mixed" if launched.chunks and launched.decodes else "prefill" if launched.chunks else "decode"


def test_flows_lead_from_each_chunk_to_its_step_and_from_preemptors_to_victims(
    exported: tuple[Decoded, Recorder],
) -> None:
    decoded, recorder = exported
    to_steps = [(begin, end) for begin, end in decoded.flows if begin.name == "chunk"]
    assert len(to_steps) == sum(len(step.chunks) for step in recorder.steps) > 0
    assert all(end.args["step"] == begin.args["step"] and end.name.endswith("step") for begin, end in to_steps)
    to_victims = [(begin, end) for begin, end in decoded.flows if begin.name == "preempts"]
    assert len(to_steps) + len(to_victims) == len(decoded.flows)
    sequences = of_requests(decoded)
    by_others = [(victim, by) for victim, by in recorder.preemptions if by is not None]
    assert len(to_victims) == len(by_others)
    for (begin, end), (victim, by) in zip(to_victims, by_others, strict=True):
        assert (begin.args["request"], begin.args["index"]) == victim
        assert (begin.track, end.track) == (sequences[by].track, sequences[victim].track)
        assert end.name == "is preempted"


def test_packets_are_as_the_trace_processor_wants_them(exported: tuple[Decoded, Recorder]) -> None:
    decoded, _ = exported
    first, *others = decoded.trace.packet
    assert first.sequence_flags == 1
    assert {packet.sequence_flags for packet in others} == {2}
    assert {packet.trusted_packet_sequence_id for packet in decoded.trace.packet} == {1}
    tracks = set(decoded.tracks)
    assert 0 not in tracks
    described: set[int] = set()
    for packet in others:
        if packet.HasField("track_descriptor"):
            described.add(packet.track_descriptor.uuid)
            assert packet.track_descriptor.parent_uuid in described | {0}
        else:
            assert packet.track_event.track_uuid in described


def test_the_time_of_day(tmp_path: Path) -> None:
    path = FOLDER / "edf_tight.jsonl"

    def at(unix_start_ns: str) -> list[Any]:
        def change(objects: list[dict[str, Any]]) -> None:
            objects[0]["unix_start_ns"] = unix_start_ns

        export_timeline(tampered(path, tmp_path / "t", change), tmp_path / "run.pftrace", to="perfetto")
        return [
            (clock.clock_id, clock.timestamp)
            for packet in Decoded(tmp_path / "run.pftrace").trace.packet
            for clock in packet.clock_snapshot.clocks
        ]

    assert at("1795746080196420842") == [(6, 0), (1, 1795746080196420842)]
    assert at("0") == []


def test_a_chunk_that_is_drawn_late_ends_its_flow(tmp_path: Path) -> None:
    """In a pipeline a sequence's chunk may begin before the one before it has ended."""
    with LogReader(FOLDER / "fcfs_one_replica.jsonl") as reader:
        header: Header = reader.header
    recorder = folded(FOLDER / "fcfs_one_replica.jsonl")
    step = next(step for step in recorder.steps if step.chunks)
    chunk = step.chunks[0]
    late = chunk._replace(start_ns=step.fact.start_ns + 1, end_ns=step.fact.end_ns)
    with (tmp_path / "run.pftrace").open("wb") as file:
        writer = PerfettoWriter(file)
        writer.begin(header)
        writer.sequence_began(chunk.sequence)
        writer.step_ended(TracedStep(step.launched, step.fact, [late], True))
        writer.sequence_ended(chunk.sequence, step.fact.ts, "length", None)
    ((begin, end),) = Decoded(tmp_path / "run.pftrace").flows
    assert (begin.name, end.name) == ("prefill step", "chunk")


def test_steps_that_overlap_have_tracks_of_their_own(tmp_path: Path) -> None:
    with LogReader(FOLDER / "fcfs_one_replica.jsonl") as reader:
        header: Header = reader.header
    with (tmp_path / "run.pftrace").open("wb") as file:
        writer = PerfettoWriter(file)
        writer.begin(header)
        for s, (start_ns, end_ns) in enumerate([(0, 10), (5, 15), (10, 20), (18, 25), (30, 29)], start=1):
            launched = Launched(s=s, replica=0, epoch=1, step=s, num_tokens=1, predicted_ns=5)
            done = StepCompleted(replica=0, epoch=1, step=s, start_ns=start_ns, end_ns=end_ns, produced=[])
            writer.step_ended(TracedStep(launched, done, [], True))
    steps = Decoded(tmp_path / "run.pftrace").slices
    assert [each.track.rpartition("/")[2] for each in steps] == ["steps", "steps 1", "steps", "steps 1", "steps"]


def test_a_window_holds_flows_only_where_both_ends_are_drawn(tmp_path: Path) -> None:
    path = FOLDER / "edf_tight.jsonl"
    whole = folded(path)
    starts = sorted(set(whole.starts.values()))
    export_timeline(path, tmp_path / "run.pftrace", to="perfetto", window=TimeWindow(starts[1], starts[3]))
    decoded = Decoded(tmp_path / "run.pftrace")
    assert 0 < len(of_requests(decoded)) < len(whole.starts)
    assert any(each.name == "chunk" for each in decoded.slices)
    assert all(starts[1] <= ns < starts[3] for values in decoded.counters.values() for ns, _ in values)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = "\u2028<script>alert(1)</script>\x00" * 20

    def change(objects: list[dict[str, Any]]) -> None:
        for item in objects:
            if item["t"] == "arrive":
                item["scheduling"]["service_class"] = name

    export_timeline(
        tampered(FOLDER / "edf_tight.jsonl", tmp_path / "t", change), tmp_path / "run.pftrace", to="perfetto"
    )
    outer = of_requests(Decoded(tmp_path / "run.pftrace"))
    assert {each.args["service_class"] for each in outer.values()} == {name}
