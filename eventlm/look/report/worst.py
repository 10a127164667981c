"""The requests of a run that are worth a look, with their stories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from eventlm.look.findings.finding import Finding, RunColumns
from eventlm.look.report.measures import Measures
from eventlm.replay.explain.indexed import explain_indexed
from eventlm.replay.explain.result import Explanation, parts
from eventlm.replay.explain.story import describe
from eventlm.replay.explain.words import label
from eventlm.replay.index.index import Index
from eventlm.types import SequenceId

#: Of each measure.
_NUM_WORST = 40
#: Of each finding.
_NUM_OF_FINDING = 5
MAX_STORIES = 48
#: Events that are verified once more for the stories: some one and a half seconds.
MAX_STORY_EVENTS = 40_000
_MAX_PARTS = 12


def worst_rows(index: Index, measures: Measures) -> list[int]:
    """Rows of `requests` in order: those with the longest TTFT, end-to-end and queueing times and the most
    preemptions, the worst of each first.
    """
    requests = index.requests
    # What still waits at the end of the log counts.
    waits = RunColumns(index).waited_ns
    waited = np.where(requests["ended_ns"] >= 0, measures.queue, waits)
    rankings = [
        np.argsort(-values, kind="stable")[:_NUM_WORST]
        for values in (measures.ttft, measures.e2e, waited, requests["preemptions"])
    ]
    rankings[-1] = rankings[-1][requests["preemptions"][rankings[-1]] > 0]
    return _merged(ranking.tolist() for ranking in rankings)


def finding_rows(index: Index, findings: list[Finding]) -> list[int]:
    """Rows of the requests that findings name."""
    rows = ([index.find_row(*each) for each in finding.requests[:_NUM_OF_FINDING]] for finding in findings)
    return _merged([row for row in of_finding if row is not None] for of_finding in rows)


def _merged(rankings: Iterable[list[int]]) -> list[int]:
    """The first of each, then the second of each, and so on, each once."""
    lists = list(rankings)
    longest = max(map(len, lists), default=0)
    return list(dict.fromkeys(each[place] for place in range(longest) for each in lists if place < len(each)))


def stories(index: Index, rows: list[int]) -> dict[str, Any]:
    """By row: where the time of the request went, in sentences and by cause."""
    requests = index.requests
    wanted = {SequenceId(int(requests["request"][row]), int(requests["index"][row])): row for row in rows[:MAX_STORIES]}
    found = explain_indexed(index, list(wanted), max_events=MAX_STORY_EVENTS)
    return {str(wanted[identity]): _story(explanation) for identity, explanation in found.items()}


def _story(explanation: Explanation) -> dict[str, Any]:
    found = parts(explanation)
    shown = [{"label": label(part.phase, part.cause), "ns": part.duration_ns} for part in found[:_MAX_PARTS]]
    if len(found) > _MAX_PARTS:
        shown.append({"label": "other", "ns": sum(part.duration_ns for part in found[_MAX_PARTS:])})
    # A page has no code marks.
    return {"text": [text.replace("`", "") for text in describe(explanation)], "parts": shown}
