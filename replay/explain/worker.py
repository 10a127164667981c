"""The process that explains a reply of a running server: `python -m eventlm.replay.explain.worker`.

It reads an `ExplainRequest` as JSON and writes an `ExplainResponse`, at low priority, because the server is running.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator

import msgspec

from eventlm.engine.explanations import ExplainRequest, ExplainResponse
from eventlm.errors import EventLMError, UsageError
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.result import Explanation
from eventlm.replay.explain.story import describe, part_rows, to_object

_NICENESS = 10
_WIDTH = 100


def respond(request: ExplainRequest) -> ExplainResponse:
    """The explanations, or why there are none."""
    path = request.run_folder
    try:
        # The plug-ins are those of the running server.
        found = explain(path, [(seq, None) for seq in request.requests], trust_local_plugins=True)
    except UsageError as error:
        return ExplainResponse(reason="not_kept", error=_without(path, str(error)))
    except EventLMError as error:
        return ExplainResponse(reason="failed", error=_without(path, str(error)))
    return ExplainResponse(
        explanations=[msgspec.json.encode(to_object(each)).decode() for each in found.explanations],
        warnings=[_without(path, warning) for warning in found.warnings],
        text="\n\n".join("\n".join(_lines(each)) for each in found.explanations) + "\n",
    )


def _lines(explanation: Explanation) -> Iterator[str]:
    for paragraph in describe(explanation):
        yield textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield ""
    rows = [["part", "ms", "share"], *part_rows(explanation)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for part, ms, share in rows:
        yield f"{part:<{widths[0]}}  {ms:>{widths[1]}}  {share:>{widths[2]}}"


def _without(path: str, message: str) -> str:
    """Hide from clients where traces are, and how to look for others' requests."""
    return message.partition("; `eventlm")[0].partition(": `eventlm")[0].replace(path, "the trace")


def main() -> None:
    """Respond to one request."""
    # Ctrl-C is for the parent process. The output of plug-ins must not mix with the response.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=ExplainRequest)
        output.write(msgspec.json.encode(respond(request)))


if __name__ == "__main__":
    main()
