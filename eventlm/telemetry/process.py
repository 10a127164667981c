"""The process that exports the spans of a run while it goes on. The engine starts it with

    python -m eventlm.telemetry.process END

the file descriptor of its end of a socket pair. It follows the log by itself, so that the engine spends nothing on
spans, at the lowest priority. It ends when it is told to, or when the other end is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp

from eventlm.bus.log_reader import LogReader
from eventlm.errors import EventLMError, UsageError
from eventlm.system.frames import FrameConnection
from eventlm.telemetry.endpoint import headers_of
from eventlm.telemetry.messages import Callers, ExportReport, ExportSetup, decode_to_export, encode
from eventlm.telemetry.otlp import resource_of
from eventlm.telemetry.sender import SpanSender
from eventlm.telemetry.spans import SpanBuilder, SpanContext
from eventlm.telemetry.traceparent import parse_traceparent

#: How often the log is read.
POLL_SECONDS = 0.5
REPORT_SECONDS = 1.0
#: For what is left at the end.
FLUSH_SECONDS = 3.0
#: Callers of requests that the log has not shown yet.
MAX_CALLERS = 100_000
#: Events between two looks at the connections.
_EVENTS_AT_ONCE = 256
_LOWEST_PRIORITY = 19


class Exporter:
    """Follows the log of a run. `setup` and `stop` come from the engine."""

    def __init__(self) -> None:
        self.setup: asyncio.Future[ExportSetup] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.next_s = 0
        self._callers: dict[int, SpanContext] = {}
        self._builder: SpanBuilder | None = None
        self._has_begun = False

    def receive(self, body: bytes) -> None:
        """A message of the engine."""
        match decode_to_export(body):
            case ExportSetup() as setup:
                self.setup.set_result(setup)
            case Callers(traceparent=traceparent, requests=requests):
                if (caller := parse_traceparent(traceparent)) is not None:
                    self._callers |= dict.fromkeys(requests, caller)
                while len(self._callers) > MAX_CALLERS:
                    del self._callers[next(iter(self._callers))]
            case _:
                self.stop.set()

    def lose(self) -> None:
        """The engine's process has gone."""
        self.stop.set()
        if not self.setup.done():
            self.setup.cancel()

    @property
    def resume_s(self) -> int:
        """From here on a reader of the log learns all of the spans that are not made yet."""
        oldest = self._builder.oldest_live if self._builder is not None else None
        return self.next_s if oldest is None else oldest

    async def follow(self, setup: ExportSetup, sender: SpanSender) -> None:
        """Read the log until `stop` is set, and then to its end. Raises TraceCorruptError."""
        self.next_s = setup.from_s
        builder = self._builder = SpanBuilder(
            lambda span: sender.put(span, self.resume_s), parent_of=lambda request: self._callers.pop(request, None)
        )
        is_last = False
        while not is_last:
            is_last = self.stop.is_set()
            # A segment may be removed at any time.
            with contextlib.suppress(UsageError), LogReader(setup.run_folder) as reader:
                # The wait is between opening, which fixes what will be read, and reading: the message on a caller
                # comes a moment after its request is in the log.
                if not is_last:
                    await self._pause()
                await self._read(reader, builder)
                continue
            if not is_last:
                await self._pause()
        builder.finish()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), POLL_SECONDS)

    async def _read(self, reader: LogReader, builder: SpanBuilder) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self.next_s > reader.header.s:
                builder.apply(reader.header)
        for line in reader.lines_from(self.next_s):
            builder.apply(line.event())
            self.next_s = line.s + 1
            if line.s % _EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)


async def _export(end: socket.socket) -> int:
    exporter = Exporter()
    connection = await FrameConnection.open(end, exporter.receive, exporter.lose)
    try:
        setup = await exporter.setup
    except asyncio.CancelledError:
        return 0
    with LogReader(setup.run_folder) as reader:
        resource = resource_of(reader.header)
    async with aiohttp.ClientSession(headers=headers_of(os.environ)) as session:
        sender = SpanSender(session, setup.url, resource)

        def report() -> None:
            connection.send(
                encode(
                    ExportReport(
                        num_sent=sender.num_sent,
                        num_dropped=dict(sender.num_dropped),
                        num_failures=sender.num_failures,
                        num_waiting=sender.num_waiting,
                        problem=sender.problem,
                        next_s=exporter.next_s,
                        resume_s=exporter.resume_s if sender.resume_s is None else sender.resume_s,
                    )
                )
            )

        async def keep_reporting() -> None:
            while True:
                report()
                await asyncio.sleep(REPORT_SECONDS)

        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(sender.run()), group.create_task(keep_reporting())]
            await exporter.follow(setup, sender)
            for task in beside:
                task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sender.flush(), FLUSH_SECONDS)
        report()
    await connection.close()
    return 0


def main() -> int:
    """Entry point of the process."""
    # Service managers may signal all processes of a server; this one leaves when the engine is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        # Where the kernel groups processes by session, priorities count only within the group, which has its own.
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))
    try:
        return asyncio.run(_export(socket.socket(fileno=int(sys.argv[1]))))
    except* EventLMError as errors:
        print(f"spans cannot be made: {errors.exceptions[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
