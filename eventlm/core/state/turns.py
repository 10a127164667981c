"""Whose turn it is: which replicas of a set may have a step to launch, found by what has changed since they were asked.

A plan goes in rounds of one step a replica, fewest admitted tokens first. It would be the same if every replica with
room for a step were asked in every round: those that are left out here would have launched nothing and changed nothing,
because nothing has changed since it was asked before. That holds while

* nothing on the replica has changed: its steps, its residents, its blocks, its own line;
* the line that any replica may take from is as it was, or empty;
* time does not matter: no half-done prompt is resident (a batcher may have held it back for now), and nobody waits
  under a policy whose keys change with time;
* no sequence of the set is suspected: suspects are tried where there is nothing else to do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

#: (admitted tokens, number of the replica), smaller goes first.
Turn = tuple[int, int]


class Tally:
    """What the replicas of a set have in common, kept by themselves.

    changed: replicas that have changed since the last plan; moved: those whose load has since the last look at loads.
    ups: the numbers of those whose worker is up, in order. num_running: residents of all.
    """

    __slots__ = ("changed", "moved", "num_running", "ups")

    def __init__(self) -> None:
        self.changed: dict[int, None] = {}
        self.moved: dict[int, None] = {}
        self.ups: list[int] = []
        self.num_running = 0

    def note(self, replica: int) -> None:
        """A replica has changed, and its load with it."""
        self.changed[replica] = None
        self.moved[replica] = None

    def note_steps(self, replica: int) -> None:
        """A replica's steps in flight have changed, but not its load."""
        self.changed[replica] = None

    def note_worker(self, replica: int, *, up: bool) -> None:
        """A worker has come up, or is lost."""
        self.note(replica)
        index = bisect_left(self.ups, replica)
        if up:
            self.ups.insert(index, replica)
        else:
            del self.ups[index]


class Turns:
    """Replicas with room for a step, in order, and which of them are due."""

    def __init__(self) -> None:
        self._with_room: list[Turn] = []
        self._listed: dict[int, Turn] = {}
        #: Those that are due in every round.
        self._standing: dict[int, None] = {}
        self._due: list[Turn] = []

    def update(self, replica: int, turn: Turn | None, *, stands: bool) -> None:
        """A replica has changed. turn: None if it has no room for a step. stands: whether time may matter to it."""
        before = self._listed.get(replica)
        if before != turn:
            if before is not None:
                del self._with_room[bisect_left(self._with_room, before)]
                del self._listed[replica]
            if turn is not None:
                insort(self._with_room, turn)
                self._listed[replica] = turn
        if stands and turn is not None:
            self._standing[replica] = None
        else:
            self._standing.pop(replica, None)

    def begin_round(self, changed: dict[int, None]) -> None:
        """Those of `changed` that have room are due, and those for which time may matter."""
        listed = self._listed
        asked = changed | self._standing if self._standing else changed
        self._due = sorted([listed[replica] for replica in asked if replica in listed])

    @property
    def standing(self) -> list[int]:
        """The replicas with room to which time may matter, in order of their numbers."""
        return sorted(self._standing)

    @property
    def has_standing(self) -> bool:
        """Whether there are any."""
        return bool(self._standing)

    @property
    def has_due(self) -> bool:
        """Whether any replica is due in this round."""
        return bool(self._due)

    @property
    def has_room(self) -> bool:
        """Whether any replica has room for a step."""
        return bool(self._with_room)

    def after(self, turn: Turn, *, every: bool) -> Turn | None:
        """The next turn of this round. every: of all that have room, not only of those that are due."""
        turns = self._with_room if every else self._due
        index = bisect_right(turns, turn)
        return turns[index] if index < len(turns) else None
