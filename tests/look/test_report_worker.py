"""The process that makes a report: what it is asked and what it answers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eventlm.engine.reports import ReportHead, ReportRequest
from eventlm.errors import UsageError
from eventlm.look.report_worker import respond
from eventlm.types import TimeWindow

REQUEST = ReportRequest(run_folder="/runs/run-1", window=TimeWindow(5, 9))


def parts(answer: bytes) -> tuple[ReportHead, str]:
    head, _, page = answer.partition(b"\n")
    return msgspec.json.decode(head, type=ReportHead), page.decode()


def test_the_page_follows_the_head() -> None:
    asked = []

    def build(folder: Path, window: TimeWindow) -> str:
        asked.append((folder, window))
        return "<html>\nÄ</html>\n"

    assert parts(respond(REQUEST, build)) == (ReportHead(), "<html>\nÄ</html>\n")
    assert asked == [(Path("/runs/run-1"), TimeWindow(5, 9))]


def test_what_is_wrong_with_the_trace_is_told_without_its_path() -> None:
    def build(folder: Path, window: TimeWindow) -> str:
        raise UsageError(f"{folder}/trace.jsonl: damaged at byte 7")

    head, page = parts(respond(REQUEST, build))
    assert (head.reason, head.error, page) == ("failed", "the trace/trace.jsonl: damaged at byte 7", "")
