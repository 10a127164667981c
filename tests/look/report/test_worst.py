"""Which requests are worth a look, and their stories."""

from __future__ import annotations

from collections.abc import Callable

from eventlm.look.findings.find import find_all
from eventlm.look.report.measures import measure
from eventlm.look.report.worst import MAX_STORIES, finding_rows, stories, worst_rows
from eventlm.replay.index.index import Index


def test_the_worst_of_each_measure_come_first(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("oscillating_eviction")
    measures = measure(index)
    rows = worst_rows(index, measures)
    assert len(rows) == len(set(rows))
    preemptions = index.requests["preemptions"]
    firsts = [int(measures.ttft.argmax()), int(measures.e2e.argmax()), int(preemptions.argmax())]
    assert set(firsts) <= set(rows[:4])


def test_findings_name_requests(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    found = find_all(index)
    rows = finding_rows(index, found)
    assert index.find_row(*found[0].requests[0]) == rows[0]
    assert {index.name(int(index.requests["service_class"][row])) for row in rows[:5]} == {"reports"}


def test_stories_add_up(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    measures = measure(index)
    rows = worst_rows(index, measures)
    found = stories(index, rows)
    assert 10 < len(found) <= MAX_STORIES
    for row, story in found.items():
        assert sum(part["ns"] for part in story["parts"]) == measures.e2e[int(row)]
        assert story["text"][0].startswith(f"Request {index.requests['request'][int(row)]} ")
