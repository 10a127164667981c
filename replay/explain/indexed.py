"""Explanations of sequences of an indexed run: from the core's state near their arrivals, not from the run's start."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.bus.log_reader import LogReader
from eventlm.replay.explain.explainer import Explainer
from eventlm.replay.explain.result import Explanation
from eventlm.replay.index.index import Index
from eventlm.replay.verify.verifier import Verifier
from eventlm.types import SequenceId

#: From a first event up to before another one.
_Span = tuple[int, int]


def explain_indexed(index: Index, wanted: Sequence[SequenceId], *, max_events: int) -> dict[SequenceId, Explanation]:
    """Explanations of sequences in the order of `wanted`, as many as need no more than `max_events` events verified.

    Sequences that live at the same time share those events. Empty if the run was not verified.
    """
    if index.rebuilt is None:
        return {}
    spans: list[_Span] = []
    chosen: list[SequenceId] = []
    for identity in wanted:
        row = index.find_row(*identity)
        if row is None:
            continue
        joined = _joined([*spans, _span(index, row)])
        if sum(end - first for first, end in joined) <= max_events:
            spans = joined
            chosen.append(identity)
    found: dict[SequenceId, Explanation] = {}
    for span in spans:
        found.update(_explain(index, span, [each for each in chosen if span[0] <= each.request < span[1]]))
    return {identity: found[identity] for identity in chosen if identity in found}


def _span(index: Index, row: int) -> _Span:
    """The events from the latest snapshot before the arrival of a sequence until its end."""
    request, ended_s = int(index.requests["request"][row]), int(index.requests["ended_s"][row])
    start = index.snapshot_before(request)
    first = index.facts.first_s if start is None else start.next_s
    return min(first, request), ended_s + 1 if ended_s >= 0 else index.facts.next_s


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    """Spans in order, those that overlap as one."""
    joined: list[_Span] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined


def _explain(index: Index, span: _Span, wanted: Sequence[SequenceId]) -> dict[SequenceId, Explanation]:
    assert index.rebuilt is not None
    start = index.snapshot_before(span[0])
    core = None if start is None else index.rebuilt.restored_core(start.state())
    by_request: dict[int, list[int] | None] = {}
    for request, number in wanted:
        indices = by_request.setdefault(request, [])
        assert indices is not None
        indices.append(number)
    explainer = Explainer(Verifier(index.rebuilt, index.header, core=core), by_request, index.backend_names)
    with LogReader(index.path) as reader:
        for line in reader.lines_from(index.facts.first_s if core is None else core.next_seq):
            explainer.feed(line)
            # What follows may be damaged.
            if explainer.is_done or line.s >= index.facts.next_s - 1:
                break
    explainer.end()
    return explainer.found
