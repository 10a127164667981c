"""Reports by a process of its own: one at a time, for a bounded time, and none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from eventlm.engine import reports
from eventlm.engine.reports import NoReportError, Reports
from eventlm.system.processes import SystemProcesses
from eventlm.types import TimeWindow
from tests.engine.test_explanations import mine
from tests.processes import wait_until

RUN = Path("no such run")
WINDOW = TimeWindow(0, 60)


def use_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """In place of the process that makes reports: one with this source."""
    (folder / "stub_report_worker.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(reports, "WORKER_MODULE", "stub_report_worker")


async def refusal(asked: Reports, folder: Path | None = RUN) -> NoReportError:
    with pytest.raises(NoReportError) as caught:
        await asked.make(folder, WINDOW)
    return caught.value


async def test_the_page_is_what_follows_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(tmp_path, monkeypatch, "import sys\nprint('{}')\nprint(sys.stdin.read())\n")
    page = await Reports(SystemProcesses()).make(RUN, WINDOW)
    assert page == b'{"run_folder":"no such run","window":[0,60]}\n'


async def test_a_run_that_is_not_recorded_has_none() -> None:
    before = mine()
    assert (await refusal(Reports(SystemProcesses()), None)).reason == "not_recorded"
    assert mine() == before


async def test_there_is_one_at_a_time_and_a_caller_that_leaves_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_worker(tmp_path, monkeypatch, "import time\ntime.sleep(600)\n")
    before = mine()
    asked = Reports(SystemProcesses())
    first = asyncio.create_task(asked.make(RUN, WINDOW))
    await asyncio.to_thread(wait_until, lambda: mine() - before)
    assert (await refusal(asked)).reason == "busy"
    assert len(mine() - before) == 1
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    assert mine() == before
    use_worker(tmp_path, monkeypatch, "print('{}')\n")
    assert await asked.make(RUN, WINDOW) == b""


async def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(tmp_path, monkeypatch, "import time\ntime.sleep(600)\n")
    before = mine()
    assert (await refusal(Reports(SystemProcesses(), timeout_seconds=0.05))).reason == "too_long"
    assert mine() == before


async def test_why_it_made_none_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_worker(tmp_path, monkeypatch, """print('{"reason":"failed","error":"the trace is damaged"}')""")
    with capture_logs() as logs:
        error = await refusal(Reports(SystemProcesses()))
        assert (error.reason, str(error)) == ("failed", "the trace is damaged")
        monkeypatch.setattr(reports, "WORKER_MODULE", "eventlm.no_such_module")
        assert (await refusal(Reports(SystemProcesses()))).reason == "failed"
    failed, died = logs
    assert failed["reason"] == "the trace is damaged"
    assert "No module named eventlm.no_such_module" in died["complaint"]


async def test_the_real_process_runs(tmp_path: Path) -> None:
    error = await refusal(Reports(SystemProcesses()), tmp_path)
    assert error.reason == "failed"
