"""Records as a load leaves them, made by hand."""

from __future__ import annotations

from typing import Any

from eventlm.bench.records import LoadResult, RequestRecord

MS = 1_000_000


def record(
    index: int = 0, *, intended: float, tokens: list[float], end: float | None = None, **more: Any
) -> RequestRecord:
    """A request, times in ms after the start; it was sent when it was meant to, unless `sent` says otherwise."""
    sent = more.pop("sent", intended)
    fields = {"prompt_tokens": 10, "output_tokens": len(tokens), "counted_by_server": True, "finish_reason": "length"}
    return RequestRecord(
        index=index,
        intended_ns=round(intended * MS),
        sent_ns=round(sent * MS),
        end_ns=round((tokens[-1] if end is None else end) * MS),
        token_times_ns=[round(time * MS) for time in tokens],
        **(fields | more),
    )


def result(*records: RequestRecord, duration: float = 1000.0, **more: Any) -> LoadResult:
    """A load of `duration` ms."""
    return LoadResult(list(records), duration_ns=round(duration * MS), **({"cpu_ns": 0} | more))
