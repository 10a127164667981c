"""Spans of requests: phases add up, ids lead to the span above, figures are those of the metrics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived, Forwarded, ForwardFailed
from eventlm.metrics.rows import RequestRow
from eventlm.telemetry.phases import UNFINISHED
from eventlm.telemetry.spans import ROOT_NAME, Span, SpanBuilder, SpanContext
from eventlm.types import TimeWindow
from tests.replay.backend_runs import record_backends
from tests.replay.branch_runs import without_first_half
from tests.replay.explained_logs import read
from tests.replay.golden import FOLDER
from tests.replay.traces import Objects, read_objects, tampered, write_objects
from tests.replay.workload_runs import record

TIGHT = FOLDER / "edf_tight.jsonl"
PHASES = ("edge", "queue", "prefill", "decode", "preempted", "recompute", "retry", "text_end")


def spans_of(path: Path, window: TimeWindow | None = None) -> list[Span]:
    found: list[Span] = []
    builder = SpanBuilder(found.append, window=window)
    with LogReader(path) as reader:
        reader.fold(builder.apply)
    builder.finish()
    return found


@pytest.fixture(scope="module", params=["tight", "random"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tight":
        return TIGHT
    folder = tmp_path_factory.mktemp("runs")
    record(folder, 5)
    return folder / "seed-5"


def test_phases_add_up_to_the_span_above(trace: Path) -> None:
    check_sums(trace)


def test_a_request_that_was_live_where_the_log_begins_is_a_span_from_there_on(tmp_path: Path) -> None:
    record(tmp_path, 5)
    run = without_first_half(tmp_path / "seed-5")
    check_sums(run)
    with LogReader(run) as reader:
        header = reader.header
    roots = [span for span in spans_of(run) if span.name == ROOT_NAME]
    before = [span for span in roots if int(str(span.attributes["eventlm.request"])) < header.s]
    assert before
    assert {span.start_ns - int(header.unix_start_ns) for span in before} == {header.ts}


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_an_attempt_at_another_server_is_a_span_beside_the_phases(tmp_path: Path, seed: int) -> None:
    path = record_backends(tmp_path, seed)
    events = read(path).events
    spans = spans_of(path)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    attempts = [span for span in spans if span.name == "attempt"]
    sent = [event for event in events if isinstance(event, Forwarded)]
    assert len(attempts) == len(sent)
    n = {event.s: event.n for event in events if isinstance(event, Arrived)}
    for span in attempts:
        above = by_id[span.parent_id]
        assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns
        root = by_id[above.parent_id] if above.name == "sample" else above
        assert (above.name == "sample") == (n[int(str(root.attributes["eventlm.request"]))] > 1)
        assert span.attributes["server.address"] == f"backend-{span.attributes['eventlm.replica']}:8000"
        assert span.error == span.attributes.get("error.type", "")
    ends = Counter(span.error for span in attempts)
    failures = Counter(event.kind for event in events if isinstance(event, ForwardFailed))
    # A failure of an attempt that does not count any more is none.
    assert all(ends[kind] <= count for kind, count in failures.items())
    assert sum(ends.values()) - ends[""] > 0
    hedges = sum(span.attributes["eventlm.hedge"] == "true" for span in attempts)
    assert hedges == sum(event.hedge for event in sent)
    for span in spans:
        below = [each for each in spans if each.parent_id == span.span_id and each.name in PHASES]
        if below:
            assert sum(each.end_ns - each.start_ns for each in below) == span.end_ns - span.start_ns


def check_sums(trace: Path) -> None:
    spans = spans_of(trace)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    children: dict[str, list[Span]] = {}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.name != ROOT_NAME:
            above = by_id[span.parent_id]
            assert (above.trace_id, above.name) == (span.trace_id, ROOT_NAME if span.name == "sample" else above.name)
            assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns
            children.setdefault(span.parent_id, []).append(span)
    num_sums = 0
    for parent, below in children.items():
        phases = [span for span in below if span.name in PHASES]
        if phases:
            num_sums += 1
            assert len(phases) == len(below)
            assert sum(span.end_ns - span.start_ns for span in phases) == by_id[parent].end_ns - by_id[parent].start_ns
    assert num_sums > 10
    samples = [span for span in spans if span.name == "sample"]
    assert samples
    roots = {span.attributes["eventlm.request"]: span for span in spans if span.name == ROOT_NAME}
    for request, root in roots.items():
        n = root.attributes["gen_ai.request.n"]
        assert len([span for span in samples if span.trace_id == root.trace_id]) == (0 if n == 1 else n), request


def test_figures_are_those_of_the_metrics(trace: Path) -> None:
    log = read(trace)
    spans = spans_of(trace)
    start_ns = int(read_objects(trace if trace.is_file() else min(trace.glob("trace*")))[0]["unix_start_ns"])
    owners: dict[tuple[int, int], Span] = {}
    requests = {span.trace_id: span for span in spans if span.name == ROOT_NAME}
    for span in spans:
        root = requests[span.trace_id]
        if span.name == "sample" or (span is root and root.attributes["gen_ai.request.n"] == 1):
            index = span.attributes.get("eventlm.sample", 0)
            owners[int(str(root.attributes["gen_ai.request.id"])), int(str(index))] = span
    assert log.rows
    for identity, row in log.rows.items():
        span = owners[identity]
        check_latencies(span, row)
        assert span.end_ns == start_ns + row.finished_ns
        assert span.end_ns - span.start_ns == row.request_e2e_time
        assert span.attributes["gen_ai.usage.output_tokens"] == row.output_tokens
        assert span.attributes["eventlm.preemptions"] == row.request_num_preemptions
        assert span.attributes["gen_ai.response.finish_reasons"] == [row.reason]


def check_latencies(span: Span, row: RequestRow) -> None:
    for name, value in (
        ("time_in_queue", row.request_scheduling_delay),
        ("time_to_first_token", row.prefill_e2e_time),
        ("e2e", row.request_e2e_time),
        ("time_in_model_prefill", row.request_prefill_time),
        ("time_in_model_decode", row.request_decode_time),
        ("time_in_model_inference", row.request_inference_time),
    ):
        expected = None if value is None else pytest.approx(value / 1e9)
        assert span.attributes.get(f"gen_ai.latency.{name}") == expected


def test_the_same_log_gives_the_same_spans_and_another_run_gives_others(tmp_path: Path) -> None:
    spans = spans_of(TIGHT)
    assert spans_of(TIGHT) == spans

    def rename(objects: Objects) -> None:
        objects[0]["run"] = "another"

    others = spans_of(tampered(TIGHT, tmp_path / "t", rename))
    assert not {span.trace_id for span in spans} & {span.trace_id for span in others}
    assert not {span.span_id for span in spans} & {span.span_id for span in others}


def test_preemptions_are_events_of_the_request() -> None:
    events = [event for span in spans_of(TIGHT) if span.name == ROOT_NAME for event in span.events]
    assert {event.name for event in events} == {"preempted"}
    preempts = [item for item in read_objects(TIGHT) if item["t"] == "preempt"]
    assert len(events) == len(preempts)
    assert sorted(event.attributes["eventlm.reason"] for event in events) == sorted(item["reason"] for item in preempts)


def test_the_callers_span_is_the_parent() -> None:
    caller = SpanContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    asked: list[int] = []

    def parent_of(request: int) -> SpanContext | None:
        asked.append(request)
        return caller if len(asked) == 1 else None

    found: list[Span] = []
    builder = SpanBuilder(found.append, parent_of=parent_of)
    with LogReader(TIGHT) as reader:
        reader.fold(builder.apply)
    builder.finish()
    assert len(asked) == len(set(asked))
    own = [span for span in found if span.trace_id == caller.trace_id]
    assert len({span.attributes.get("gen_ai.request.id") for span in own if span.name == ROOT_NAME}) == 1
    assert [span.parent_id for span in own if span.name == ROOT_NAME] == [caller.span_id]
    assert len(own) > 2
    assert all(len(span.trace_id) == 32 and len(span.span_id) == 16 for span in found)


def test_rejected_requests_have_spans_too(tmp_path: Path) -> None:
    objects = read_objects(TIGHT)
    last = max(index for index, item in enumerate(objects) if item["t"] == "arrive")
    del objects[last + 1 :]
    objects.append({"t": "reject", "s": 0, "ts": objects[-1]["ts"], "request": last, "reason": "queue_full"})
    spans = spans_of(write_objects(tmp_path / "t", objects))
    (root,) = [span for span in spans if span.attributes.get("eventlm.request") == last]
    assert (root.error, root.attributes["error.type"]) == ("rejected: queue_full", "rejected: queue_full")
    assert not [span for span in spans if span.parent_id == root.span_id]


def test_unfinished_requests_have_spans_too(tmp_path: Path) -> None:
    def cut(objects: Objects) -> None:
        del objects[len(objects) // 2 :]

    roots = [span for span in spans_of(tampered(TIGHT, tmp_path / "t", cut)) if span.name == ROOT_NAME]
    unfinished = [span for span in roots if UNFINISHED in span.attributes["gen_ai.response.finish_reasons"]]  # type: ignore[operator]
    assert unfinished
    assert len({span.end_ns for span in unfinished}) == 1


def test_a_window() -> None:
    spans = spans_of(TIGHT)
    starts = sorted({item["ts"] for item in read_objects(TIGHT) if item["t"] == "arrive"})
    window = TimeWindow(starts[1], starts[3])
    some = spans_of(TIGHT, window)
    wanted = {item["s"] for item in read_objects(TIGHT) if item["t"] == "arrive" and window.has(item["ts"])}
    assert {span.attributes["eventlm.request"] for span in some if span.name == ROOT_NAME} == wanted
    assert all(span in spans for span in some)
