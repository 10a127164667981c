"""Pairs the requests of two runs of the same workload. Positions in the log differ, so they cannot be used.

A request is identified by its parameters and by the prompt blocks and session that it shares with earlier ones. Block
and session integers differ between runs, so each is named after the request that introduced it. Equal requests are
paired in order. The rest are paired by fewer properties: without blocks and session (a run may be cut short, a block's
name forgotten), then without model and max_tokens too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from itertools import groupby

from msgspec import Struct

from eventlm.events import Arrived


class Pairing(Struct, frozen=True, kw_only=True):
    """Requests by the seq of their arrival. `pairs` are (of A, of B), in A's order."""

    pairs: list[tuple[int, int]]
    only_a: list[int]
    only_b: list[int]


class Profile(Struct, frozen=True):
    """Keys that identify a request, the most specific first."""

    request: int
    keys: tuple[Hashable, ...]


def pair_requests(a: Sequence[Arrived], b: Sequence[Arrived]) -> Pairing:
    """Pair the arrivals of two runs, each in the order of its log."""
    numbers: dict[Hashable, int] = {}
    left_a, left_b = _profiles(a, numbers), _profiles(b, numbers)
    partner: dict[int, int] = {}
    for level in range(len(left_a[0].keys) if left_a else 0):
        waiting: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        for profile in left_b:
            waiting[profile.keys[level]].append(profile.request)
        unpaired = []
        for profile in left_a:
            alike = waiting.get(profile.keys[level])
            if alike:
                partner[profile.request] = alike.popleft()
            else:
                unpaired.append(profile)
        taken = set(partner.values())
        left_a, left_b = unpaired, [profile for profile in left_b if profile.request not in taken]
    return Pairing(
        pairs=[(arrival.s, partner[arrival.s]) for arrival in a if arrival.s in partner],
        only_a=[profile.request for profile in left_a],
        only_b=[profile.request for profile in left_b],
    )


def _profiles(arrivals: Sequence[Arrived], numbers: dict[Hashable, int]) -> list[Profile]:
    """`numbers` identify requests in both runs by their parameters and their rank among equal ones."""
    num_alike: Counter[Hashable] = Counter()
    #: The requests that introduced each block and each session.
    brought_by: dict[int, int] = {}
    began_by: dict[int, int] = {}
    found = []
    for arrival in arrivals:
        body = (
            arrival.scheduling.kind,
            arrival.n,
            arrival.prompt_tokens,
            arrival.scheduling.priority,
            arrival.scheduling.service_class,
        )
        limits = (*body, arrival.scheduling.model, arrival.max_tokens)
        rank = num_alike[limits]
        num_alike[limits] += 1
        own = numbers.setdefault((limits, rank), len(numbers))
        # New blocks have no name, because the rank among equal requests depends on the order of arrival. Runs of
        # blocks are counted: a prompt of thousands of blocks shares them with few requests.
        shares = [(giver, sum(1 for _ in blocks)) for giver, blocks in groupby(arrival.blocks, brought_by.get)]
        shared = (*shares, began_by.get(arrival.scheduling.session))
        for block in arrival.blocks:
            brought_by.setdefault(block, own)
        if arrival.scheduling.session:
            began_by.setdefault(arrival.scheduling.session, own)
        found.append(Profile(arrival.s, ((limits, shared), limits, body)))
    return found
