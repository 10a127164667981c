"""The process that explains a reply of a running server: `python -m eventlm.replay.explain.worker`.

One JSON object comes in, an `ExplainQuestion`, and one goes out, an `ExplainAnswer`. It takes the processor only when
nobody else wants it, for the server runs beside it.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator

import msgspec

from eventlm.engine.explanations import ExplainAnswer, ExplainQuestion
from eventlm.errors import EventLMError, UsageError
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.result import Explanation
from eventlm.replay.explain.story import part_rows, tell, to_object

_NICENESS = 10
_WIDTH = 100


def answer(question: ExplainQuestion) -> ExplainAnswer:
    """The explanations, or why there are none."""
    path = question.run_folder
    try:
        # The plug-ins are those that the server runs with, as whoever started it chose them.
        found = explain(path, [(request, None) for request in question.requests], trust_local_plugins=True)
    except UsageError as error:
        return ExplainAnswer(reason="not_kept", error=_without(path, str(error)))
    except EventLMError as error:
        return ExplainAnswer(reason="failed", error=_without(path, str(error)))
    return ExplainAnswer(
        explanations=[msgspec.json.encode(to_object(each)).decode() for each in found.explanations],
        warnings=[_without(path, warning) for warning in found.warnings],
        text="\n\n".join("\n".join(_lines(each)) for each in found.explanations) + "\n",
    )


def _lines(explanation: Explanation) -> Iterator[str]:
    for paragraph in tell(explanation):
        yield textwrap.fill(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield ""
    rows = [["part", "ms", "share"], *part_rows(explanation)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for part, ms, share in rows:
        yield f"{part:<{widths[0]}}  {ms:>{widths[1]}}  {share:>{widths[2]}}"


def _without(path: str, message: str) -> str:
    """Clients need not know where traces lie, nor how to look for others' requests."""
    return message.partition("; `eventlm")[0].partition(": `eventlm")[0].replace(path, "the trace")


def main() -> None:
    """Answer one question."""
    # Ctrl-C is for whoever started this; what a plug-in prints must not stand in the answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=ExplainQuestion)
        answers.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()
