"""The latest rows of ended sequences, and no more than so many."""

from __future__ import annotations

from eventlm.metrics.rows import EndedRows, RequestRow
from eventlm.types import SequenceId


def row(request: int) -> RequestRow:
    return RequestRow(
        request=request,
        index=0,
        replica=0,
        reason="eos",
        arrived_ns=1,
        finished_ns=2,
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=0,
        request_e2e_time=1,
    )


def test_the_oldest_go_first() -> None:
    rows = EndedRows(max_rows=2)
    for request in (1, 2, 3):
        rows.request_ended(row(request))
    found = [rows.find(SequenceId(request, 0)) for request in (1, 2, 3, 4)]
    assert [each and each.request for each in found] == [None, 2, 3, None]
