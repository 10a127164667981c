"""The process that exports spans, on logs that are complete and on one whose reader starts in the middle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from eventlm.system.frames import FrameConnection
from eventlm.system.paired_process import spawn_paired
from eventlm.system.system import real_system
from eventlm.telemetry.exporter import MODULE
from eventlm.telemetry.messages import Callers, ExportReport, ExportSetup, StopExport, ToExport, decode_report, encode
from eventlm.telemetry.process import Exporter
from eventlm.telemetry.sender import SpanSender
from eventlm.telemetry.spans import Span
from tests.replay.traces import read_objects
from tests.replay.workload_runs import record
from tests.telemetry.receiver import check_phases_add_up, receiving
from tests.telemetry.test_spans import TIGHT, spans_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def export(*messages: ToExport) -> ExportReport:
    """The last report of a process that is told this."""
    process, end = await spawn_paired(real_system(), MODULE)
    reports: list[ExportReport] = []
    lost = asyncio.Event()
    connection = await FrameConnection.open(end, lambda body: reports.append(decode_report(body)), lost.set)
    for message in messages:
        connection.send(encode(message))
    await lost.wait()
    assert await process.wait() == 0
    return reports[-1]


async def test_all_spans_of_several_segments_arrive(tmp_path: Path) -> None:
    record(tmp_path, 5)
    folder = tmp_path / "seed-5"
    expected = spans_of(folder)
    with receiving() as receiver:
        setup = ExportSetup(run_folder=str(folder), url=f"{receiver.url}/v1/traces", from_s=0)
        report = await export(setup, StopExport())
    assert (report.num_sent, report.num_dropped, report.num_waiting, report.problem) == (len(expected), {}, 0, "")
    assert [span.span_id.hex() for span in receiver.spans] == [span.span_id for span in expected]
    assert check_phases_add_up(receiver.spans) > 10


async def test_a_log_from_the_middle_gives_the_spans_of_what_arrives_after_it() -> None:
    arrivals = [line["s"] for line in read_objects(TIGHT) if line["t"] == "arrive"]
    middle = arrivals[len(arrivals) // 2]
    with receiving() as receiver:
        setup = ExportSetup(run_folder=str(TIGHT), url=f"{receiver.url}/v1/traces", from_s=middle)
        report = await export(setup, StopExport())
    assert sorted(receiver.roots) == [s for s in arrivals if s >= middle]
    assert report.resume_s == read_objects(TIGHT)[-1]["s"] + 1


async def test_callers_are_parents_unless_they_record_nothing() -> None:
    first, second, third = [line["s"] for line in read_objects(TIGHT) if line["t"] == "arrive"][:3]
    with receiving() as receiver:
        await export(
            ExportSetup(run_folder=str(TIGHT), url=f"{receiver.url}/v1/traces", from_s=0),
            Callers(f"00-{TRACE}-{SPAN}-01", [first]),
            Callers(f"00-{TRACE}-{SPAN}-00", [second]),
            StopExport(),
        )
    roots = receiver.roots
    assert second not in roots
    assert (roots[first].trace_id.hex(), roots[first].parent_span_id.hex()) == (TRACE, SPAN)
    assert roots[third].parent_span_id == b""
    phases = [span for span in receiver.spans if span.parent_span_id == roots[first].span_id]
    assert phases
    assert {span.trace_id.hex() for span in phases} == {TRACE}


async def test_without_its_engine_it_ends_after_a_last_flush(tmp_path: Path) -> None:
    with receiving() as receiver:
        process, end = await spawn_paired(real_system(), MODULE)
        connection = await FrameConnection.open(end, lambda _: None, lambda: None)
        connection.send(encode(ExportSetup(run_folder=str(TIGHT), url=f"{receiver.url}/v1/traces", from_s=0)))
        await connection.close()
        assert await process.wait() == 0
        assert len(receiver.spans) == len(spans_of(TIGHT))


async def test_a_damaged_log_ends_it_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = TIGHT.read_text().splitlines(keepends=True)
    damaged = tmp_path / "trace.jsonl"
    damaged.write_text("".join([*text[:9], text[9].replace("1", "2", 1), *text[10:]]))
    process, end = await spawn_paired(real_system(), MODULE)
    lost = asyncio.Event()
    connection = await FrameConnection.open(end, lambda _: None, lost.set)
    connection.send(encode(ExportSetup(run_folder=str(damaged), url="http://127.0.0.1:9/v1/traces", from_s=0)))
    await lost.wait()
    assert await process.wait() == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "line 10" in line


class KeepingSender(SpanSender):
    """Keeps all spans, with the event from which they can be made again."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        super().__init__(session, "", {})
        self.kept: list[tuple[Span, int]] = []

    def put(self, span: Span, resume_s: int = 0) -> None:
        self.kept.append((span, resume_s))


async def kept_from(from_s: int) -> list[tuple[Span, int]]:
    async with aiohttp.ClientSession() as session:
        exporter, sender = Exporter(), KeepingSender(session)
        exporter.stop.set()
        await exporter.follow(ExportSetup(run_folder=str(TIGHT), url="", from_s=from_s), sender)
    return sender.kept


async def test_from_where_a_span_resumes_it_and_all_later_ones_are_made_again() -> None:
    kept = await kept_from(0)
    positions = [resume_s for _, resume_s in kept]
    assert positions == sorted(positions)
    arrivals = [line["s"] for line in read_objects(TIGHT) if line["t"] == "arrive"]
    # It goes on while requests are live, not only where the run is idle.
    assert len(set(positions)) > len(arrivals) // 4
    for resume_s in sorted(set(positions)):
        again = {span.span_id for span, _ in await kept_from(resume_s)}
        assert {span.span_id for span, each in kept if each >= resume_s} <= again
