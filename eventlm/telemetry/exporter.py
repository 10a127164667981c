"""The engine's side of the process that exports spans: starts it, starts it again, tells it callers, ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import msgspec
import structlog

from eventlm.formatting import death_in_words
from eventlm.metrics.components import SpanExportMetrics
from eventlm.system.frames import FrameConnection
from eventlm.system.paired_process import spawn_paired
from eventlm.system.processes import Process
from eventlm.system.system import System
from eventlm.telemetry.messages import (
    Callers,
    ExportReport,
    ExportSetup,
    StopExport,
    ToExport,
    decode_report,
    encode,
)

MODULE = "eventlm.telemetry.process"
#: Pause before a restart. Each early death doubles it; a process that has lived for STEADY_SECONDS resets it.
RESTART_SECONDS, STEADY_SECONDS = 0.5, 60.0
#: Early deaths in a row before no process is started again.
MAX_FAILURES = 5
#: For the end of the log and the last spans; then it is killed.
STOP_SECONDS = 6.0
#: What the process may leave unread. Beyond it, it learns no callers.
MAX_BACKLOG_BYTES = 1 << 20
#: Callers that a process in place of this one would need.
MAX_CALLERS = 100_000

log = structlog.get_logger("eventlm.telemetry")


class SpanExporter:
    """Exports the spans of the run in `run_folder` to `url` from `start` to `stop`. Nothing of it ever fails or waits
    but `stop`, which is bounded.
    """

    def __init__(self, system: System, run_folder: Path, url: str) -> None:
        self._system = system
        self._run_folder = run_folder
        self._url = url
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = asyncio.Event()
        self._connection: FrameConnection | None = None
        self._process: Process | None = None
        self._num_restarts = 0
        self._report = ExportReport()
        #: Of the processes before the present one.
        self._before = ExportReport()
        #: The `traceparent` of requests from `resume_s` on.
        self._callers: dict[int, str] = {}

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def metrics(self, next_s: int = 0) -> SpanExportMetrics:
        """Figures of all its processes, at most a second old. next_s: the position of the log's next event."""
        before, report = self._before, self._report
        return SpanExportMetrics(
            is_up=self._process is not None,
            num_sent=before.num_sent + report.num_sent,
            num_dropped=dict(Counter(before.num_dropped) + Counter(report.num_dropped)),
            num_failures=before.num_failures + report.num_failures,
            num_waiting=report.num_waiting,
            num_events_behind=max(next_s - report.next_s, 0),
            num_restarts=self._num_restarts,
        )

    def start(self) -> None:
        """Start the process, in a task of its own."""
        self._task = asyncio.create_task(self._supervise())

    def note_caller(self, traceparent: str, requests: list[int]) -> None:
        """These requests, which have just arrived, belong to that span of their caller."""
        self._callers |= dict.fromkeys(requests, traceparent)
        while len(self._callers) > MAX_CALLERS:
            del self._callers[next(iter(self._callers))]
        self._send(Callers(traceparent, requests))

    async def stop(self) -> None:
        """Let it read the log, which is complete, to its end, and send what is left; kill it if that takes long."""
        if self._task is None:
            return
        self._is_stopping.set()
        self._send(StopExport())
        await asyncio.wait({self._task}, timeout=STOP_SECONDS)
        if not self._task.done():
            log.warning("the last spans were not sent in time", seconds=STOP_SECONDS)
            self._task.cancel()
            await asyncio.wait({self._task})
        self._task = None
        metrics = self.metrics()
        (log.warning if metrics.num_dropped else log.info)(
            "spans exported", sent=metrics.num_sent, dropped=metrics.num_dropped, failed_posts=metrics.num_failures
        )

    def _send(self, message: ToExport) -> None:
        connection = self._connection
        if connection is not None and connection.backlog_bytes < MAX_BACKLOG_BYTES:
            connection.send(encode(message))

    async def _supervise(self) -> None:
        num_early = 0
        while True:
            began_ns = self._system.clock.monotonic_ns()
            ending = await self._run_once()
            if self._is_stopping.is_set():
                return
            is_steady = self._system.clock.monotonic_ns() - began_ns >= STEADY_SECONDS * 1e9
            num_early = 1 if is_steady else num_early + 1
            if num_early > MAX_FAILURES:
                log.error("no more spans are exported: the process for them does not stay alive", reason=ending)
                return
            log.warning("the process that exports spans was lost", reason=ending)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), RESTART_SECONDS * 2 ** (num_early - 1))
            self._num_restarts += 1

    async def _run_once(self) -> str:
        """One process from its start to its end; how it ended, in words."""
        lost = asyncio.Event()
        try:
            self._process, end = await spawn_paired(self._system, MODULE)
        except OSError as error:
            return str(error)
        try:
            self._connection = await FrameConnection.open(end, self._receive, lost.set)
            self._begin()
            await lost.wait()
            return death_in_words(await self._process.wait())
        finally:
            self._end_process()

    def _begin(self) -> None:
        from_s = self._report.resume_s
        self._send(ExportSetup(run_folder=str(self._run_folder), url=self._url, from_s=from_s))
        for request, traceparent in self._callers.items():
            self._send(Callers(traceparent, [request]))
        if self._is_stopping.is_set():
            self._send(StopExport())

    def _end_process(self) -> None:
        if self._connection is not None:
            self._connection.abort()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._connection = self._process = None
        sums = self.metrics()
        self._before = ExportReport(
            num_sent=sums.num_sent, num_dropped=sums.num_dropped, num_failures=sums.num_failures
        )
        self._report = ExportReport(next_s=self._report.resume_s, resume_s=self._report.resume_s)

    def _receive(self, body: bytes) -> None:
        try:
            report = decode_report(body)
        except msgspec.DecodeError:
            return
        if bool(report.problem) != bool(self._report.problem):
            if report.problem:
                log.warning("spans cannot be sent", url=self._url, reason=report.problem)
            else:
                log.info("spans are sent again", url=self._url)
        self._report = report
        while self._callers and (oldest := next(iter(self._callers))) < report.resume_s:
            del self._callers[oldest]
