"""Which replica of a set has least to do, without a look at each."""

from __future__ import annotations

from bisect import bisect_left, insort

from eventlm.core.state.prefix_index import bits_of

#: Of so few replicas each is looked at.
_FEW = 24


class Loads:
    """The replicas whose workers are up, in order of their loads, which are counted in tokens.

    first: the number of the set's first replica. Of replicas with equal loads the one counts that comes first in a
    turn which starts at a number and goes round.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._in_order: list[tuple[int, int]] = []
        self._known: dict[int, int] = {}

    def set(self, replica: int, load: int | None) -> None:
        """None: its worker is not up."""
        before = self._known.pop(replica, None)
        if before is not None:
            del self._in_order[bisect_left(self._in_order, (before, replica))]
        if load is not None:
            insort(self._in_order, (load, replica))
            self._known[replica] = load

    def lightest(self, start: int) -> int:
        """The number of the replica with the smallest load. Some worker is up."""
        in_order = self._in_order
        load, replica = in_order[0]
        index = bisect_left(in_order, (load, start))
        return in_order[index][1] if index < len(in_order) and in_order[index][0] == load else replica

    def lightest_of(self, replicas: int, start: int) -> int:
        """The same among some whose workers are up, which are given as bits by their place in the set."""
        first, known = self._first, self._known
        if replicas.bit_count() <= _FEW:
            numbers = [first + position for position in bits_of(replicas)]
            return min(numbers, key=lambda number: (known[number], number < start, number))
        best: tuple[int, bool, int] | None = None
        for load, number in self._in_order:
            if best is not None and load > best[0]:
                break
            if replicas >> (number - first) & 1:
                found = (load, number < start, number)
                best = found if best is None else min(best, found)
        assert best is not None
        return best[2]
