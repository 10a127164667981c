"""Which request continues which: turns of one conversation come after the end of the turn before.

Replayed at fixed times they would overstate an overload, because people wait for an answer before they reply to it.
Recorded runs show ends and generated blocks. Public traces name their sessions, or their prompts show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eventlm.events import Arrived
from eventlm.replay.workload.import_formats import SourceRow


def find_parents(arrivals: Sequence[Arrived], ends_ns: Sequence[int], generated: Sequence[Sequence[int]]) -> list[int]:
    """For each request of a run the index of the one that it continues, else -1.

    That is the latest of its session that had ended when it arrived (`ends_ns`; -1: never). Without a session it is the
    latest whose output it holds: a block of its prompt has the name of one that the other `generated`. A common
    beginning of prompts, such as a system prompt, does not count.
    """
    parents = []
    of_session: dict[int, list[int]] = {}
    #: By replicaset and name: each set names its blocks by itself.
    owner: dict[tuple[int, int], int] = {}

    def latest_ended(indices: Sequence[int], now_ns: int) -> int:
        # Newest first: a session can be as long as the run.
        return next((index for index in reversed(indices) if 0 <= ends_ns[index] <= now_ns), -1)

    for index, arrival in enumerate(arrivals):
        if arrival.group_index:
            # A group arrives as one, with its first member.
            parents.append(-1)
        elif arrival.scheduling.session:
            parents.append(latest_ended(of_session.get(arrival.scheduling.session, ()), arrival.ts))
        else:
            keys = [(arrival.replicaset, block) for block in arrival.blocks]
            parents.append(latest_ended([owner[key] for key in keys if key in owner], arrival.ts))
        if arrival.scheduling.session:
            of_session.setdefault(arrival.scheduling.session, []).append(index)
        for block in generated[index]:
            owner.setdefault((arrival.replicaset, block), index)
    return parents


class Link(NamedTuple):
    """The index of the request that one continues, else -1; and how long after its end it came, if known."""

    parent: int = -1
    think_ns: int | None = None


def link_by_name(rows: Sequence[SourceRow]) -> list[Link]:
    """Each row names its parent; ignored unless the parent is an earlier row."""
    index_of: dict[str, int] = {}
    links = []
    for index, row in enumerate(rows):
        links.append(Link(index_of.get(row.parent_key, -1)) if row.parent_key else Link())
        if row.key:
            index_of[row.key] = index
    return links


def link_by_session(rows: Sequence[SourceRow]) -> list[Link]:
    """The turns of a session follow each other. If the source has the duration of answers, a request that came before
    an answer's end did not wait for it.
    """
    turns_of: dict[str, list[int]] = {}
    links = []
    for index, row in enumerate(rows):
        link = Link()
        if row.session_key:
            turns = turns_of.setdefault(row.session_key, [])
            link = _latest_ended(rows, turns, row)
            turns.append(index)
        links.append(link)
    return links


def _latest_ended(rows: Sequence[SourceRow], turns: Sequence[int], row: SourceRow) -> Link:
    for before in reversed(turns):
        elapsed_ns = rows[before].elapsed_ns
        if elapsed_ns is None:
            return Link(before)
        think_ns = row.arrived_ns - rows[before].arrived_ns - elapsed_ns
        if think_ns >= 0:
            return Link(before, think_ns)
    return Link()


def link_by_blocks(rows: Sequence[SourceRow], block_size: int) -> list[Link]:
    """A turn's prompt contains the turn before and its answer.

    The parent is the latest earlier request whose full blocks all begin the prompt, and whose prompt and answer
    together are not longer than the prompt. Its last full block must be new, except to the turns that it continues
    itself (a short turn fills no block of its own). If a prompt without a parent ends in that block too, the block is a
    shared beginning, such as a system prompt, and no longer counts.
    A block's name stands for everything before it too.
    """
    known: set[int] = set()
    #: The turns that end in a full block, by the block's position and name, beginning with the one that introduced it.
    ending_in: dict[tuple[int, int], list[int]] = {}
    links = []
    for index, row in enumerate(rows):
        link = _extended(rows, ending_in, row)
        links.append(link)
        num_full = min(row.prompt_tokens // block_size, len(row.blocks))
        if num_full:
            last = (num_full - 1, row.blocks[num_full - 1])
            turns = ending_in.get(last, [])
            if last[1] not in known:
                ending_in[last] = [index]
            elif link.parent in turns:
                turns.append(index)
            elif link.parent < 0 and all(rows[turn].blocks != row.blocks for turn in turns):
                turns.clear()
        known.update(row.blocks)
    return links


def _extended(rows: Sequence[SourceRow], ending_in: dict[tuple[int, int], list[int]], row: SourceRow) -> Link:
    for last in reversed(list(enumerate(row.blocks))):
        for index in reversed(ending_in.get(last, ())):
            before = rows[index]
            is_later = before.arrived_ns < row.arrived_ns
            if is_later and before.prompt_tokens + before.output_tokens <= row.prompt_tokens:
                return Link(index)
    return Link()


def number_sessions(links: Sequence[Link]) -> list[int]:
    """Session numbers from 1 in the order of their beginnings; 0 for single requests."""
    has_turns = {link.parent for link in links}
    sessions: list[int] = []
    num_sessions = 0
    for index, link in enumerate(links):
        if link.parent >= 0:
            sessions.append(sessions[link.parent])
        elif index in has_turns:
            num_sessions += 1
            sessions.append(num_sessions)
        else:
            sessions.append(0)
    return sessions
