"""Which request of a public trace goes on from which, as far as its format says so or its prompts show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eventlm.replay.workload.import_formats import SourceRow


class Link(NamedTuple):
    """The place of the request that one goes on from, else -1; and how long after that one's end it came, if known."""

    parent: int = -1
    think_ns: int | None = None


def link_by_name(rows: Sequence[SourceRow]) -> list[Link]:
    """Each row names its parent. One that is not in the trace, or not above it, is none."""
    place_of: dict[str, int] = {}
    links = []
    for place, row in enumerate(rows):
        links.append(Link(place_of.get(row.parent_key, -1)) if row.parent_key else Link())
        if row.key:
            place_of[row.key] = place
    return links


def link_by_session(rows: Sequence[SourceRow]) -> list[Link]:
    """The turns of a session follow each other. Where the source says how long an answer took, a request that came
    before the answer's end was not waiting for it."""
    turns_of: dict[str, list[int]] = {}
    links = []
    for place, row in enumerate(rows):
        link = Link()
        if row.session_key:
            turns = turns_of.setdefault(row.session_key, [])
            link = _latest_ended(rows, turns, row)
            turns.append(place)
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
    """A turn's prompt holds the one before it and its answer.

    So the parent is the latest earlier request all of whose full blocks the prompt begins with, and whose prompt and
    answer together are not longer than the prompt. Its last full block is one that nobody had before it but the turns
    that it goes on from itself: a short turn fills no block of its own. Once a prompt that goes on from none ends in
    that block too, the block is a beginning that many share, a system prompt say, and tells nothing more.
    A block's name stands for all that precedes it.
    """
    known: set[int] = set()
    #: The turns that end in a full block, from the one that brought it on, by its place in the prompt and its name.
    ending_in: dict[tuple[int, int], list[int]] = {}
    links = []
    for place, row in enumerate(rows):
        link = _extended(rows, ending_in, row)
        links.append(link)
        num_full = min(row.prompt_tokens // block_size, len(row.blocks))
        if num_full:
            last = (num_full - 1, row.blocks[num_full - 1])
            turns = ending_in.get(last, [])
            if last[1] not in known:
                ending_in[last] = [place]
            elif link.parent in turns:
                turns.append(place)
            elif link.parent < 0 and all(rows[turn].blocks != row.blocks for turn in turns):
                turns.clear()
        known.update(row.blocks)
    return links


def _extended(rows: Sequence[SourceRow], ending_in: dict[tuple[int, int], list[int]], row: SourceRow) -> Link:
    for last in reversed(list(enumerate(row.blocks))):
        for place in reversed(ending_in.get(last, ())):
            before = rows[place]
            is_later = before.arrived_ns < row.arrived_ns
            if is_later and before.prompt_tokens + before.output_tokens <= row.prompt_tokens:
                return Link(place)
    return Link()


def number_sessions(links: Sequence[Link]) -> list[int]:
    """From 1, in the order of their beginnings; 0 for requests that stand alone."""
    has_turns = {link.parent for link in links}
    sessions: list[int] = []
    num_sessions = 0
    for place, link in enumerate(links):
        if link.parent >= 0:
            sessions.append(sessions[link.parent])
        elif place in has_turns:
            num_sessions += 1
            sessions.append(num_sessions)
        else:
            sessions.append(0)
    return sessions
