"""A branch as a table for people and as an object for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from eventlm.formatting import counted
from eventlm.replay.branch.branch import BranchResult
from eventlm.replay.branch.pairing import PairedOutcome, RequestPair
from eventlm.replay.what_if import report as what_if_report
from eventlm.replay.why.constraints import named
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

#: Requests that won most, and that lost most, in the table.
NUM_PAIRS = 5
_COLUMNS = ("request", "prompt", "e2e, ms", "branch", "change", "TTFT, ms", "branch", "preempted")


def to_object(result: BranchResult) -> dict[str, Any]:
    """All that is in the tables, as JSON has it, and all pairs. Times are nanoseconds."""
    found = what_if_report.as_object(result.what_if) | {
        "branch": {
            "s": result.s,
            "ts": result.now_ns,
            "num_live": result.num_live,
            "num_later": result.num_later,
            "trace": result.what_if.alternatives[0].run_folder or None,
        },
        "pairs": [
            msgspec.structs.asdict(pair) | {"e2e_difference_ns": pair.e2e_difference_ns} for pair in result.pairs
        ],
    }
    return dict(msgspec.to_builtins(found, order="deterministic"))


def render(result: BranchResult) -> str:
    """Lines of at most 120 characters where names are short; without a last newline."""
    return "\n".join(_lines(result))


def _lines(result: BranchResult) -> Iterator[str]:
    live = counted(result.num_live, "request")
    yield (
        f"branch after event {result.s:,}, at {result.now_ns / NANOSECONDS_PER_SECOND:.6f} s: {live} under way, "
        f"{result.num_later:,} to come"
    )
    yield what_if_report.render(result.what_if)
    changed = sorted(
        (pair for pair in result.pairs if pair.e2e_difference_ns), key=lambda pair: pair.e2e_difference_ns or 0
    )
    if changed:
        yield ""
        yield from table(_COLUMNS, [_row(pair) for pair in _most_changed(changed)])
        yield textwrap.fill(
            "Requests that changed most: recorded, and in the branch, whose times are as far off as the baseline's. "
            "TTFT and preemptions are those after the point.",
            what_if_report.MAX_WIDTH,
        )


def _most_changed(changed: list[RequestPair]) -> list[RequestPair]:
    return changed if len(changed) <= 2 * NUM_PAIRS else [*changed[:NUM_PAIRS], *changed[-NUM_PAIRS:]]


def _row(pair: RequestPair) -> list[str]:
    before, after = pair.recorded, pair.branch
    assert before is not None
    assert after is not None
    return [
        named((pair.request, pair.index)),
        f"{pair.prompt_tokens:,}",
        _ms(before.e2e_ns),
        _ms(after.e2e_ns),
        f"{(pair.e2e_difference_ns or 0) / NANOSECONDS_PER_MILLISECOND:+,.1f}",
        _ms(before.ttft_ns),
        _ms(after.ttft_ns),
        _preempted(before, after),
    ]


def _ms(value_ns: int | None) -> str:
    return "-" if value_ns is None else f"{value_ns / NANOSECONDS_PER_MILLISECOND:,.1f}"


def _preempted(before: PairedOutcome, after: PairedOutcome) -> str:
    return f"{before.num_preemptions} -> {after.num_preemptions}"
