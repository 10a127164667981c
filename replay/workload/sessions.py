"""Which request goes on from which: turns of one conversation come after the end of the turn before.

Replayed at fixed times they would overstate an overload, because people wait for an answer before they reply to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.events import Arrived


def find_parents(arrivals: Sequence[Arrived], ends_ns: Sequence[int], generated: Sequence[Sequence[int]]) -> list[int]:
    """For each request the place of the one whose end it came after, else -1.

    That is the latest of its session that had ended when it arrived (`ends_ns`; -1: never), or where it says none, the
    latest whose output it holds: a block of its prompt has the name of one that the other had `generated`. A prompt
    that only begins alike (a system prompt, say) shows nothing.
    """
    parents = []
    of_session: dict[int, list[int]] = {}
    owner: dict[int, int] = {}

    def latest_ended(places: Sequence[int], now_ns: int) -> int:
        # From behind: a session can be as long as the run.
        return next((place for place in reversed(places) if 0 <= ends_ns[place] <= now_ns), -1)

    for place, arrival in enumerate(arrivals):
        if arrival.group_index:
            # A group arrives as one, with its first member.
            parents.append(-1)
        elif arrival.scheduling.session:
            parents.append(latest_ended(of_session.get(arrival.scheduling.session, ()), arrival.ts))
        else:
            parents.append(latest_ended([owner[block] for block in arrival.blocks if block in owner], arrival.ts))
        if arrival.scheduling.session:
            of_session.setdefault(arrival.scheduling.session, []).append(place)
        for block in generated[place]:
            owner.setdefault(block, place)
    return parents
