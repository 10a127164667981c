"""The process that makes a report for a running server: `python -m eventlm.look.report_worker`.

It reads a `ReportRequest` as JSON and writes a `ReportHead` as a line of JSON, then the page. It has a lower
priority, because the server is running.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from eventlm.engine.reports import ReportHead, ReportRequest
from eventlm.errors import EventLMError
from eventlm.look.report.build import build_report
from eventlm.types import TimeWindow

#: Less than a busy server, but not so little that a report never comes.
_NICENESS = 5

#: Makes the page of a part of a run, from the run's folder.
Build = Callable[[Path, TimeWindow], str]


def respond(request: ReportRequest, build: Build) -> bytes:
    """The answer: the page, or why there is none."""
    try:
        page = build(Path(request.run_folder), request.window)
    except EventLMError as error:
        # The page's reader may look at the run, and need not know where it lies.
        why = str(error).replace(request.run_folder, "the trace")
        return msgspec.json.encode(ReportHead(reason="failed", error=why)) + b"\n"
    return msgspec.json.encode(ReportHead()) + b"\n" + page.encode()


def main() -> None:
    """Respond to one request."""
    # Ctrl-C is for the parent process. The output of plug-ins must not mix with the response.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=ReportRequest)
        output.write(respond(request, build_report))


if __name__ == "__main__":
    main()
