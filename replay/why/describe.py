"""Why a sequence waits, as lines for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from eventlm.formatting import counted
from eventlm.replay.explain.result import Order
from eventlm.replay.explain.story import by_key
from eventlm.replay.explain.words import CAUSES, milliseconds
from eventlm.replay.why.constraints import ConstraintName, named
from eventlm.replay.why.holders import BlockHolder, PoolUse
from eventlm.replay.why.next_step import NextStep
from eventlm.replay.why.place import PlaceInLine
from eventlm.replay.why.why import Why
from eventlm.table import table
from eventlm.types import NANOSECONDS_PER_SECOND

_VERDICTS = {"met": "ok", "stops": "STOPS", "unasked": "-"}
_NAMES: dict[ConstraintName, str] = {
    "grammar": "grammar",
    "text_end": "text end",
    "draining": "earlier rows in flight",
    "paused": "pause",
    "worker": "worker",
    "steps_in_flight": "steps in flight",
    "rows_in_flight": "own rows in flight",
    "trial": "trial alone",
    "head_of_line": "head of the line",
    "sequence_limit": "sequence limit",
    "avoided": "failed there",
    "backend_limit": "limit of the backend",
    "backend": "backend",
    "backoff": "backoff",
    "blocks": "blocks",
    "state_slots": "state slots",
    "token_budget": "token budget",
    "batcher": "batcher",
    "skips": "skips",
}
#: Holders that have lines of their own.
_MAX_HOLDERS = 8


def describe_why(found: Why) -> Iterator[str]:
    """Lines: what it is, the verdict, the constraints, the place in line, who holds the blocks."""
    yield _opening(found)
    yield _verdict(found)
    yield ""
    yield from _constraints(found)
    if found.place is not None:
        yield ""
        yield from _place(found, found.place)
    if found.pool is not None:
        yield ""
        yield from _pool(found, found.pool)


def describe_next_step(found: NextStep | None, since_ns: int) -> str:
    """When it was next in a step, or that it was not. since_ns: the time of the question."""
    if found is None:
        return "It is in no later step of the log."
    after = f"{milliseconds(found.ts - since_ns)} later, at event {found.s}"
    cause = f"on event {found.fact_s} (`{found.fact}`)" if found.fact else f"on event {found.fact_s}"
    if found.ended:
        return f"It was in no later step: it ended with `{found.ended}` {after}, {cause}."
    if found.step < 0:
        return f"Next it was sent to backend {found.replica} {after}, {cause}."
    row = f"with a chunk of {counted(found.num_tokens, 'token')}" if found.num_tokens else "with a decode"
    left = [
        f"{named(each.sequence)} {each.how}" + (f" ({counted(each.num_blocks, 'block')})" if each.num_blocks else "")
        for each in found.departures
    ]
    before = f"; before that left: {', '.join(left)}" if left else ""
    return f"Next it was in step {found.step} of replica {found.replica} {after}, {row}, planned {cause}{before}."


def to_object(found: Why) -> dict[str, Any]:
    """For JSON, with the lines."""
    built: dict[str, Any] = msgspec.to_builtins(found)
    return built | {"lines": list(describe_why(found))}


def seconds(ns: int) -> str:
    """Time of the run: `12.345678 s`."""
    return f"{ns / NANOSECONDS_PER_SECOND:,.6f} s"


def _opening(found: Why) -> str:
    what = f"sample {found.index} of request {found.request}" if found.n > 1 else f"request {found.request}"
    tokens = f"{found.num_tokens:,} of at most {found.max_total_tokens:,} tokens"
    done = f"{found.launched_tokens:,} of {counted(found.prefill_tokens, 'prompt token')} launched"
    parts = [found.state.replace("_", " "), done if found.state == "prefill" else tokens]
    if found.num_blocks:
        parts.append(counted(found.num_blocks, "block"))
    if found.num_preemptions:
        parts.append(counted(found.num_preemptions, "preemption"))
    return f"{what} at {seconds(found.now_ns)}, before event {found.next_s}: {', '.join(parts)}"


def _verdict(found: Why) -> str:
    if found.cause is None and found.is_forwarded:
        return f"Backend {found.replica} has it."
    if found.cause is None:
        steps = " and ".join(map(str, found.steps))
        return f"It is in step{'s' * (len(found.steps) > 1)} {steps} of replica {found.replica}."
    where = f" (replica {found.replica})" if found.replica >= 0 else ""
    reason = next((each for each in found.constraints if each.decides), None)
    detail = f": {reason.detail}" if reason is not None and reason.detail else ""
    nowhere = "No backend has it" if found.is_forwarded else "It is in no step"
    return f"{nowhere}. {CAUSES[found.cause].capitalize()}{where}{detail}."


def _constraints(found: Why) -> Iterator[str]:
    rows = []
    for each in found.constraints:
        where = "" if each.replica < 0 else str(each.replica)
        verdict = _VERDICTS[each.verdict] + (" <=" if each.decides else "")
        rows.append([_NAMES[each.name], where, _number(each.value), _number(each.limit), verdict, each.detail])
    yield from table(["constraint", "replica", "value", "limit", "verdict", ""], rows, left=(0, 4, 5))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _place(found: Why, place: PlaceInLine) -> Iterator[str]:
    where = f" of replica {place.replica}" if place.replica >= 0 else ""
    line = {"waiting": "the line", "partial prefills": "the half-done prompts", "decodes": "the decodes"}[place.line]
    key = f"{place.policy}: priority {place.priority}, key {place.key:,}"
    yield f"place {place.place:,} of {place.total:,} in {line}{where}, by {key}; the order is no constraint by itself"
    if place.ahead is not None:
        yield f"next ahead: {_ahead(place.ahead)}"
    if place.head is not None and place.head != place.ahead:
        yield f"head of the line: {_ahead(place.head)}"


def _ahead(order: Order) -> str:
    return f"request {named(order.other)}: {by_key(order)}"


def _pool(found: Why, pool: PoolUse) -> Iterator[str]:
    yield (
        f"replica {pool.replica} has {pool.num_blocks:,} blocks: {pool.num_free:,} free, {pool.num_cached:,} cached "
        f"and held by none, {pool.num_held:,} held by {counted(len(pool.holders), 'sequence')}"
    )
    if not pool.holders:
        return
    rows = [_holder_row(found, holder) for holder in pool.holders[:_MAX_HOLDERS]]
    yield from table(["holder", "state", "blocks", "its own", "shared with"], rows, left=(0, 1, 4))
    left = pool.holders[_MAX_HOLDERS:]
    if left:
        own = sum(holder.num_own for holder in left)
        yield f"and {counted(len(left), 'other')} with {counted(own, 'block')} of their own"


def _holder_row(found: Why, holder: BlockHolder) -> list[str]:
    name = named(holder.sequence)
    if holder.sequence == (found.request, found.index):
        name += " (it)"
    shared = ", ".join(map(named, holder.shared_with))
    left = holder.num_sharing - len(holder.shared_with)
    return [
        name,
        holder.state,
        f"{holder.num_blocks:,}",
        f"{holder.num_own:,}",
        shared + (f" and {counted(left, 'other')}" if left else ""),
    ]
