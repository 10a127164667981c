"""Sequences that can be launched once there is room, in order of urgency.

Under a static policy an entry's key never changes and a heap keeps the order; entries that have left are skipped by
their ticket. Under any other policy the keys of a round are set by `order_by`, and since most rounds look at the
head alone, the head is found by one pass and the heap is built only when the plan looks past it.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from eventlm.core.state.digest import weight
from eventlm.core.state.sequence import Sequence, Urgency


class Candidate(NamedTuple):
    """The head of a queue."""

    urgency: Urgency
    sequence: Sequence


#: (priority, key, request, index, ticket, sequence). The first five are unique, so sequences are never compared.
_Entry = tuple[int, int, int, int, int, Sequence]


class WaitingQueue:
    """One queue. `members` is in order of (request, index)."""

    __slots__ = ("_head", "_heap", "_keys", "_passed", "_priorities", "digest", "members", "num_tokens")

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        #: Of the members, in their order.
        self._priorities: list[int] = []
        self.num_tokens = 0
        self.digest = 0
        self._heap: list[_Entry] | None = None
        self._keys: list[int] = []
        self._head: Candidate | None = None
        self._passed: list[_Entry] = []

    def __len__(self) -> int:
        return len(self.members)

    def add(self, sequence: Sequence, key: int) -> None:
        """Put a sequence in line. Under a policy that is not static `key` counts until the next round."""
        index = bisect_left(self.members, sequence.id, key=_id)
        self.members.insert(index, sequence)
        self._priorities.insert(index, sequence.view.priority)
        # Counted by the sequence, so that no old entry in any queue is ever valid again.
        sequence.num_tickets += 1
        sequence.ticket = sequence.num_tickets
        self.num_tokens += sequence.num_tokens
        self.digest += _share(sequence)
        if self._heap is not None:
            heappush(self._heap, _entry(sequence, key))
        else:
            self._keys.insert(index, key)
            self._head = None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of line."""
        if self._heap is None:
            self._build_heap()
        index = bisect_left(self.members, sequence.id, key=_id)
        del self.members[index]
        del self._priorities[index]
        sequence.ticket = 0
        self.num_tokens -= sequence.num_tokens
        self.digest -= _share(sequence)
        if not self._passed and self._heap is not None and len(self._heap) > 2 * len(self.members) + 64:
            self._heap = [entry for entry in self._heap if entry[5].ticket == entry[4]]
            heapify(self._heap)

    def order_by(self, keys: list[int]) -> None:
        """Set the keys of this round, one for each of `members`. Not for a static policy."""
        self._heap = None
        self._head = None
        self._keys = keys

    def peek(self) -> Candidate | None:
        """The most urgent sequence that has not been passed over in this plan."""
        if not self.members:
            return None
        if self._heap is None:
            if self._head is None:
                self._head = self._find_head()
            return self._head
        while self._heap:
            entry = self._heap[0]
            if entry[5].ticket == entry[4]:
                return Candidate(entry[:4], entry[5])
            heappop(self._heap)
        return None

    def candidate(self, sequence: Sequence) -> Candidate:
        """A member that need not be the head, with its urgency of now. Costs a pass over the queue."""
        if self._heap is None:
            key = self._keys[bisect_left(self.members, sequence.id, key=_id)]
            return Candidate(_entry(sequence, key)[:4], sequence)
        entry = next(e for e in (*self._heap, *self._passed) if e[5] is sequence and e[4] == sequence.ticket)
        return Candidate(entry[:4], sequence)

    def in_order(self) -> list[Candidate]:
        """All members, the most urgent first. Costs a sort; between plans only."""
        if self._heap is None:
            keyed = zip(self.members, self._keys, strict=True)
            entries = sorted(_entry(sequence, key) for sequence, key in keyed)
        else:
            entries = sorted(entry for entry in self._heap if entry[5].ticket == entry[4])
        return [Candidate(entry[:4], entry[5]) for entry in entries]

    def pass_over(self) -> None:
        """Look past the head until `end_plan`."""
        if self._heap is None:
            self._build_heap()
        assert self._heap is not None
        self._passed.append(heappop(self._heap))

    def end_plan(self) -> None:
        """Those that were passed over are back in line."""
        if self._passed:
            assert self._heap is not None
            for entry in self._passed:
                heappush(self._heap, entry)
            self._passed.clear()

    def _find_head(self) -> Candidate:
        # Runs over all that wait, in every round. Of equals the first member is the earlier one.
        priority, key, index = min(zip(self._priorities, self._keys, range(len(self.members)), strict=True))
        sequence = self.members[index]
        return Candidate((priority, key, sequence.request, sequence.index), sequence)

    def _build_heap(self) -> None:
        self._heap = [_entry(sequence, key) for sequence, key in zip(self.members, self._keys, strict=True)]
        heapify(self._heap)
        self._head = None


_id = attrgetter("id")


def _entry(sequence: Sequence, key: int) -> _Entry:
    return (sequence.view.priority, key, sequence.request, sequence.index, sequence.ticket, sequence)


def _share(sequence: Sequence) -> int:
    return weight(weight(weight(sequence.request) + sequence.index) + sequence.num_tokens + sequence.key)
