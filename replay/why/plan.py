"""What the plans of a drain did, turn by turn, as a witness saw it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, TypeVar

import msgspec

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.plan_witness import (
    CandidateSeen,
    ChunkAsked,
    DecodeShort,
    EvictionWeighed,
    PlanEnded,
    PlanEntry,
    TurnTaken,
    VictimSeen,
)
from eventlm.core.state.step_plan import WaitReason
from eventlm.formatting import counted
from eventlm.replay.explain.words import CAUSES
from eventlm.replay.why.constraints import named
from eventlm.replay.why.describe import seconds
from eventlm.table import table
from eventlm.types import SequenceId

E = TypeVar("E", bound=PlanEntry)
#: Sequences that were left out for one reason and are named.
_MAX_NAMED = 8
_SHORTAGES = {
    "fewer_tokens": "a row of fewer tokens",
    "rows_in_flight": "no row until those in flight have completed",
    "block_taken": "it got one",
    "preempted": "it was preempted",
}
_CANDIDATES = {
    "partial": "next chunk",
    "admitted": "admitted",
    "blocks": "passed over: blocks",
    "token_budget": "passed over: its KV group is full",
    "trial": "passed over: a trial alone",
}
_VICTIMS = {
    "chosen": "chosen",
    "more_urgent": "not enough less urgent",
    "exempt": "evicted too often since its last token",
    "shared": "all its blocks are shared",
    "spared": "another goes first",
}


class PlannedTurn(NamedTuple):
    """One turn of a replica: what was noted between its beginning and its end, in order.

    left_out: sequences without a row, and why; known for the latest turn of each replica, else empty.
    """

    taken: TurnTaken
    entries: list[PlanEntry]
    ended: PlanEnded
    left_out: dict[SequenceId, WaitReason]

    def of(self, kind: type[E]) -> list[E]:
        """The entries of a kind."""
        return [entry for entry in self.entries if isinstance(entry, kind)]


def find_turns(state: CoreState, witness: Iterable[PlanEntry]) -> list[PlannedTurn]:
    """The turns of the latest drain, in order. witness: what was noted in it, of all replicas."""
    turns: list[PlannedTurn] = []
    entries: list[PlanEntry] = []
    latest: dict[int, int] = {}
    taken: TurnTaken | None = None
    for entry in witness:
        if isinstance(entry, TurnTaken):
            taken, entries = entry, []
        elif isinstance(entry, PlanEnded):
            assert taken is not None
            latest[entry.replica] = len(turns)
            turns.append(PlannedTurn(taken, entries, entry, {}))
        else:
            entries.append(entry)
    for replica, plan in state.plans.items():
        if replica in latest:
            turns[latest[replica]].left_out.update(plan.left_out)
    return turns


def plan_object(state: CoreState, turns: Seq[PlannedTurn]) -> dict[str, Any]:
    """For JSON, with the lines."""
    built = {
        "now_ns": state.now_ns,
        "policy": state.policy_name,
        "turns": [_turn_object(turn) for turn in turns],
        "lines": list(describe_plan(state, turns)),
    }
    found: dict[str, Any] = msgspec.to_builtins(built)
    return found


def _turn_object(turn: PlannedTurn) -> dict[str, Any]:
    rest = turn.ended.rest
    return {
        **turn.taken._asdict(),
        **turn.ended._asdict(),
        "rest": None if rest is None else rest._asdict(),
        "candidates": [entry._asdict() for entry in turn.of(CandidateSeen)],
        "chunks": [entry._asdict() for entry in turn.of(ChunkAsked)],
        "victims": [entry._asdict() for entry in turn.of(VictimSeen)],
        "evictions": [entry._asdict() for entry in turn.of(EvictionWeighed)],
        "short_decodes": [entry._asdict() for entry in turn.of(DecodeShort)],
        "left_out": [{"sequence": sequence, **reason._asdict()} for sequence, reason in turn.left_out.items()],
    }


def describe_plan(state: CoreState, turns: Seq[PlannedTurn]) -> Iterator[str]:
    """Lines on every turn of the latest drain."""
    if not turns:
        why = "no replica with a worker had room for a step"
        if state.paused:
            why = "the engine is paused"
        elif all(each.forwards is not None for each in state.replicasets):
            why = "backends plan their own steps, and whoever waits is sent to one as soon as it has room"
        yield f"nothing was planned at {seconds(state.now_ns)}: {why}"
    for number, turn in enumerate(turns):
        if number:
            yield ""
        yield from _describe_turn(state, turn)


def _describe_turn(state: CoreState, turn: PlannedTurn) -> Iterator[str]:
    taken, ended = turn.taken, turn.ended
    what = "launched nothing" if ended.step < 0 else f"launched step {ended.step}"
    yield (
        f"replica {taken.replica} at {seconds(state.now_ns)} {what}: {counted(ended.num_decodes, 'decode')} and "
        f"{counted(ended.num_chunks, 'chunk')}, {ended.num_tokens:,} of at most {counted(ended.budget_tokens, 'token')}"
    )
    yield (
        f"before it: {counted(taken.num_running, 'resident')}, {counted(taken.num_available, 'block')} available, "
        f"{counted(taken.num_in_flight, 'step')} in flight"
    )
    yield from _describe_victims(turn)
    for short in turn.of(DecodeShort):
        yield (
            f"decode {named(short.sequence)} wanted {counted(short.num_blocks, 'block')} and {short.num_available:,} "
            f"were available: {_SHORTAGES[short.verdict]}"
        )
    yield from _describe_candidates(state, turn)
    for cause in dict.fromkeys(reason.cause for reason in turn.left_out.values()):
        names = [named(sequence) for sequence, reason in turn.left_out.items() if reason.cause == cause]
        more = f" and {counted(len(names) - _MAX_NAMED, 'other')}" if len(names) > _MAX_NAMED else ""
        yield f"without a row ({CAUSES[cause]}): {', '.join(names[:_MAX_NAMED])}{more}"
    rest = ended.rest
    if rest is None:
        yield "all in line were looked at"
    else:
        who = f", {named(rest.other)}" if rest.other is not None else ""
        yield f"nobody further was looked at: {CAUSES[rest.cause]}{who}"


def _describe_victims(turn: PlannedTurn) -> Iterator[str]:
    rows = [
        [named(victim.sequence), named(victim.needed_by), victim.reason, _VICTIMS[victim.verdict]]
        for victim in turn.of(VictimSeen)
    ]
    if rows:
        yield from table(["victim", "for", "reason", "verdict"], rows, left=(0, 1, 2, 3))
    for each in turn.of(EvictionWeighed):
        lacked = [counted(each.num_lacking, "block")] if each.num_lacking > 0 else []
        lacked += ["a slot"] if each.needs_slot else []
        result = "the chosen gave way" if each.is_enough else "not enough could be had, so nobody gave way"
        yield f"the head of the line, {named(each.head)}, lacked {' and '.join(lacked)}: {result}"


def _describe_candidates(state: CoreState, turn: PlannedTurn) -> Iterator[str]:
    chunks = {entry.sequence: entry for entry in turn.of(ChunkAsked)}
    rows = []
    for seen in turn.of(CandidateSeen):
        chunk = chunks.get(seen.sequence)
        fit = [f"{seen.num_hits:,}", f"{max(seen.num_lacking, 0):,}", f"{seen.skips:,}"]
        rows.append(
            [
                named(seen.sequence),
                f"{seen.urgency[0]}",
                f"{seen.urgency[1]:,}",
                _CANDIDATES[seen.verdict],
                *(["", "", ""] if seen.verdict == "partial" else fit),
                "" if chunk is None else f"{chunk.num_tokens:,} of {chunk.max_tokens:,}",
            ]
        )
    if rows:
        key = f"key ({state.policy_name})"
        columns = ["looked at", "priority", key, "became", "cached", "lacking", "skips", "chunk"]
        yield from table(columns, rows, left=(0, 3))
