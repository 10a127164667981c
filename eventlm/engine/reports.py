"""Reports of the last minutes of a run, made from its trace by a process of its own, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from eventlm.engine.child_answer import ask_child
from eventlm.errors import EventLMError
from eventlm.system.processes import Processes
from eventlm.types import TimeWindow

log = structlog.get_logger("eventlm.engine")

WORKER_MODULE = "eventlm.look.report_worker"
TIMEOUT_SECONDS = 300.0

#: Why there is no report. busy: another one is being made. too_long: it took more than its time.
Reason = Literal["busy", "too_long", "not_recorded", "failed"]


class NoReportError(EventLMError):
    """There is no report."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class ReportRequest(Struct, frozen=True, kw_only=True):
    """The input of the process: the folder of a run, and which part of the run."""

    run_folder: str
    window: TimeWindow


class ReportHead(Struct, frozen=True, kw_only=True):
    """The first line of its answer; the page follows unless there is a reason why there is none."""

    reason: Reason | None = None
    error: str = ""


class Reports:
    """Runs the process."""

    def __init__(self, processes: Processes, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._processes = processes
        self._timeout_seconds = timeout_seconds
        self._is_busy = False

    async def make(self, run_folder: Path | None, window: TimeWindow) -> bytes:
        """The page, as HTML in UTF-8. None: the run is not recorded. Raises NoReportError.

        A caller that is cancelled leaves no process behind.
        """
        if run_folder is None:
            raise NoReportError(
                "not_recorded", "this server does not record its runs, so there is nothing to report: see --record"
            )
        if self._is_busy:
            raise NoReportError("busy", "another report is being made; try again when it is done")
        self._is_busy = True
        try:
            return await self._ask(ReportRequest(run_folder=str(run_folder), window=window))
        finally:
            self._is_busy = False

    async def _ask(self, question: ReportRequest) -> bytes:
        try:
            answer = await ask_child(
                self._processes, WORKER_MODULE, msgspec.json.encode(question), timeout_seconds=self._timeout_seconds
            )
        except TimeoutError:
            raise NoReportError(
                "too_long",
                f"the report took longer than {self._timeout_seconds:g} s; ask for fewer minutes, or make it beside "
                "the trace with `eventlm report`",
            ) from None
        first, _, page = answer.data.partition(b"\n")
        try:
            head = msgspec.json.decode(first, type=ReportHead)
        except msgspec.DecodeError as error:
            log.error("a process that makes a report died", exit_code=answer.exit_code, complaint=answer.complaint)
            raise NoReportError("failed", "the report failed; see the server's log") from error
        if head.reason == "failed":
            log.warning("a report failed", reason=head.error)
        if head.reason is not None:
            raise NoReportError(head.reason, head.error)
        return page
