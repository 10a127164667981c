"""State slots of one replica: recurrent layers keep a state for each sequence, of one size whatever its length.

A slot is free, a resident's own, a copy's, or promised to a copy whose block has no name yet. A copy hangs on a block
of the prefix tree by its name: a name stands for the block's content and all that precedes it, which is what the state
has seen. A later prompt starts from the copy. The least recently used copy gives way first, a resident's slot never.

Why a slot may be given away at once, though steps in flight still use it: a worker executes launches in order, as far
as states are concerned the rows of each in order, and a slot goes only to a row that is planned after all that used it.
For the same reason the source of a row that is launched may give way. Before that it is pinned.

Why an admission always finds a slot: pinned and promised slots are at most as many as there are beside one for each
resident that may be. Where one more would be pinned, the sequence takes the copy over as its own slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container
from typing import NamedTuple

from msgspec import Struct

from eventlm.core.state.digest import combine

#: Source of a state that begins from zero.
ZERO = -1


class Residence(Struct, array_like=True):
    """What a resident has. source: the slot that its next row starts from; `ZERO`, or its own slot: it goes on there.

    is_new: it has no row yet. promised: whole blocks of the sequence after which a row in flight keeps a copy, and its
    slot.
    """

    slot: int
    source: int
    is_new: bool = True
    promised: tuple[int, int] | None = None

    @property
    def pinned(self) -> int | None:
        """The slot that must stay as it is until the next row is launched."""
        return None if self.source in (ZERO, self.slot) else self.source


class StateStart(NamedTuple):
    """The state of a row. is_new: it is the first one of its sequence here."""

    slot: int
    source: int
    is_new: bool


class StatesSnapshot(Struct, frozen=True, kw_only=True):
    """The slots of a pool. Pins follow from the residents."""

    free: list[int]
    #: (block name, slot), least recently used first.
    copies: list[tuple[int, int]]
    #: By (request, index).
    residents: list[tuple[int, int, Residence]]


class StatePool:
    """Slots 0 to num_slots - 1, of which at most `max_residents` are residents' own. Residents go by (request, index).

    num_slots is more than max_residents.
    """

    def __init__(self, num_slots: int, max_residents: int) -> None:
        self.num_slots = num_slots
        self._num_spare = num_slots - max_residents
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a worker does that starts anew."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        #: Slot by block name, least recently used first.
        self._copies: OrderedDict[int, int] = OrderedDict()
        self._residents: dict[tuple[int, int], Residence] = {}
        #: Rows to be launched by the slot of the copy that they start from.
        self._pins: dict[int, int] = {}
        self._num_promised = 0

    @property
    def num_copies(self) -> int:
        """Copies that can be hit."""
        return len(self._copies)

    def find_deepest(self, names: list[int], first: int, last: int) -> int:
        """The most blocks, up to `last`, that end at a copy, of a path with these names; `first` if that is no more."""
        copies = self._copies
        for num_blocks in range(last, first, -1):
            if names[num_blocks - 1] in copies:
                return num_blocks
        return first

    def settle(self, resident: tuple[int, int], name: int | None) -> None:
        """Give a new resident a slot. It starts from the copy of block `name`, or from zero."""
        if name is None:
            residence = Residence(self._take(), ZERO)
        elif self._pin(name):
            residence = Residence(self._take(), self._copies[name])
        else:
            slot = self._copies.pop(name)
            residence = Residence(slot, slot)
        self._residents[resident] = residence

    def restart(self, resident: tuple[int, int], name: int) -> bool:
        """Let a resident's next row start from the copy of block `name`; False if no more copies can be pinned."""
        if not self._pin(name):
            return False
        residence = self._residents[resident]
        self._unpin(residence)
        residence.source = self._copies[name]
        return True

    def start_row(self, resident: tuple[int, int]) -> StateStart:
        """A row of a resident is launched. What it started from need not stay."""
        residence = self._residents[resident]
        start = StateStart(residence.slot, residence.source, residence.is_new)
        self._unpin(residence)
        residence.source = residence.slot
        residence.is_new = False
        return start

    def keep(self, names: list[int]) -> dict[int, int]:
        """Slots for copies at blocks of the tree, by name, as far as there are any: the last blocks go first.

        Blocks that have a copy are left out; it counts as used.
        """
        for name in names:
            if name in self._copies:
                self._copies.move_to_end(name)
        fresh = [name for name in names if name not in self._copies]
        num_available = len(self._free) + len(self._copies) - len(self._pins)
        kept = {name: self._take() for name in fresh[max(len(fresh) - num_available, 0) :]}
        self._copies.update(kept)
        return kept

    def promise(self, resident: tuple[int, int], num_blocks: int) -> tuple[int, int] | None:
        """A row of a resident keeps a copy after so many whole blocks, the last of which has no name yet: the slots of
        the resident and of the copy. None if there is none for it. A promise that is not fulfilled yet is given up.
        """
        residence = self._residents[resident]
        if residence.promised is None:
            if not self._has_spare():
                return None
            self._num_promised += 1
            slot = self._take()
        else:
            _, slot = residence.promised
        residence.promised = (num_blocks, slot)
        return residence.slot, slot

    def fulfil(self, resident: tuple[int, int], names: list[int], tree: Container[int]) -> None:
        """The blocks of a resident have these names now, so a copy that was promised can be hit if its block can."""
        residence = self._residents[resident]
        if residence.promised is None or residence.promised[0] > len(names):
            return
        num_blocks, slot = residence.promised
        residence.promised = None
        self._num_promised -= 1
        name = names[num_blocks - 1]
        if name in tree and name not in self._copies:
            self._copies[name] = slot
        else:
            self._free.append(slot)

    def leave(self, resident: tuple[int, int]) -> None:
        """Take a resident's slot, and the one promised to it."""
        residence = self._residents.pop(resident)
        self._unpin(residence)
        self._free.append(residence.slot)
        if residence.promised is not None:
            self._num_promised -= 1
            self._free.append(residence.promised[1])

    def drop(self, name: int) -> None:
        """A block has left the tree. No resident holds it, so its copy is not pinned."""
        slot = self._copies.pop(name, None)
        if slot is not None:
            self._free.append(slot)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        name, slot = next((name, slot) for name, slot in self._copies.items() if slot not in self._pins)
        del self._copies[name]
        return slot

    def _has_spare(self) -> bool:
        """Whether one more slot may be pinned or promised."""
        return len(self._pins) + self._num_promised < self._num_spare

    def _pin(self, name: int) -> bool:
        slot = self._copies[name]
        if slot not in self._pins and not self._has_spare():
            return False
        self._pins[slot] = self._pins.get(slot, 0) + 1
        self._copies.move_to_end(name)
        return True

    def _unpin(self, residence: Residence) -> None:
        slot = residence.pinned
        if slot is not None:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]

    @property
    def digest(self) -> int:
        """64 bits that stand for what every slot is."""
        residents = [(*resident, *_values(residence)) for resident, residence in self._residents.items()]
        return combine([self._free, list(self._copies.items()), residents])

    def snapshot(self) -> StatesSnapshot:
        """The pool as it is now; it shares the residents, so it is to be encoded before the pool changes."""
        residents = [(*resident, residence) for resident, residence in self._residents.items()]
        return StatesSnapshot(free=self._free, copies=list(self._copies.items()), residents=residents)

    def restore(self, taken: StatesSnapshot) -> None:
        """Become the pool that the snapshot was taken of."""
        self._free, self._copies = taken.free, OrderedDict(taken.copies)
        self._residents = {(request, index): residence for request, index, residence in taken.residents}
        self._pins = {}
        for residence in self._residents.values():
            if residence.pinned is not None:
                self._pins[residence.pinned] = self._pins.get(residence.pinned, 0) + 1
        self._num_promised = sum(residence.promised is not None for residence in self._residents.values())

    def problems(self, residents: Collection[tuple[int, int]], tree: Container[int]) -> list[str]:
        """What is wrong with the pool, given all residents and the names in the tree; empty if nothing is."""
        found = []
        own = [residence.slot for residence in self._residents.values()]
        promised = [residence.promised[1] for residence in self._residents.values() if residence.promised is not None]
        copies = list(self._copies.values())
        if sorted([*self._free, *own, *promised, *copies]) != list(range(self.num_slots)):
            found.append("state slots are lost or given twice")
        if self._residents.keys() != set(residents):
            found.append("those with a state slot are not the residents")
        if lost := [name for name in self._copies if name not in tree]:
            found.append(f"copies hang on blocks {lost[:8]}, which the tree has not")
        pinned = [residence.pinned for residence in self._residents.values() if residence.pinned is not None]
        if {slot: pinned.count(slot) for slot in pinned} != self._pins or not set(pinned) <= set(copies):
            found.append("the copies that are pinned are not those that residents start from")
        if len(promised) != self._num_promised or len(self._pins) + len(promised) > self._num_spare:
            found.append("too many state slots are pinned or promised")
        return found


def _values(residence: Residence) -> tuple[int, int, bool, tuple[int, int] | None]:
    return residence.slot, residence.source, residence.is_new, residence.promised
