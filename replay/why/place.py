"""A sequence's place in its line: a matter of the policy's order, which is no constraint by itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State, Urgency
from eventlm.core.wait_reason import urgency_now
from eventlm.replay.explain.life import order_of
from eventlm.replay.explain.result import Order

#: Of what a sequence is one: those that wait, the half-done prompts, or the decodes of a replica.
LineName = Literal["waiting", "partial prefills", "decodes"]


class PlaceInLine(Struct, frozen=True, kw_only=True):
    """A sequence's place among those that are considered together, counted from 1, by (priority, key, arrival, sample).

    key: of the policy in force; smaller goes first. ahead: the nearest one before it, head: the first of all; None
    for the first itself.
    """

    line: LineName
    replica: int
    place: int
    total: int
    policy: str
    priority: int
    key: int
    ahead: Order | None = None
    head: Order | None = None


def find_place(state: CoreState, sequence: Sequence, replica: Replica | None) -> PlaceInLine | None:
    """The place of a live sequence; None if it is in no line: without a worker or a grammar, or ended.

    replica: whose line is meant; None: the line of those that any replica may take.
    """
    if sequence.resident:
        same = sequence.state
        residents = state.replicas[sequence.replica].running
        members = [(urgency_now(state, each), each) for each in residents if each.state is same]
        name: LineName = "decodes" if same is State.DECODE else "partial prefills"
        return _place(state, sequence, sorted(members, key=lambda member: member[0]), name, sequence.replica)
    if not sequence.ticket:
        return None
    members = line_of(state, sequence, replica)
    return _place(state, sequence, members, "waiting", -1 if replica is None else replica.index)


def line_of(state: CoreState, sequence: Sequence, replica: Replica | None) -> list[tuple[Urgency, Sequence]]:
    """The line of a sequence's set at one of its replicas, in order: what was sent there and what any may take.

    replica: None: only the latter.
    """
    shared = state.set_of(sequence).shared_queue
    members = [*shared.in_order(), *(replica.queue.in_order() if replica is not None else [])]
    return sorted(((each.urgency, each.sequence) for each in members), key=lambda member: member[0])


def _place(
    state: CoreState, sequence: Sequence, members: list[tuple[Urgency, Sequence]], line: LineName, replica: int
) -> PlaceInLine:
    index = next(index for index, (_, member) in enumerate(members) if member is sequence)
    own = members[index][0]

    def order(position: int) -> Order | None:
        urgency, other = members[position]
        return order_of(state, other, urgency, own)

    return PlaceInLine(
        line=line,
        replica=replica,
        place=index + 1,
        total=len(members),
        policy=state.set_of(members[index][1]).policy_name,
        priority=own[0],
        key=own[1],
        ahead=order(index - 1) if index else None,
        head=order(0) if index else None,
    )
