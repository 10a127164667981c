"""The state pool under random use, the order in which copies give way, and that an admission always finds a slot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eventlm.core.state.state_pool import ZERO, StatePool, StatesSnapshot


def pool_with_copies(*names: int, num_slots: int = 6, max_residents: int = 2) -> StatePool:
    """Residents none; copies at blocks of these names, the first the least recently used."""
    pool = StatePool(num_slots, max_residents)
    for name in names:
        assert list(pool.keep([name])) == [name]
    return pool


def copies(pool: StatePool) -> list[int]:
    return [name for name, _ in pool.snapshot().copies]


def test_the_first_row_begins_from_zero_and_the_next_ones_go_on() -> None:
    pool = StatePool(3, 2)
    pool.settle((1, 0), None)
    pool.settle((2, 0), None)
    assert [pool.start_row((1, 0)), pool.start_row((2, 0))] == [(0, ZERO, True), (1, ZERO, True)]
    assert pool.start_row((2, 0)) == (1, 1, False)


def test_a_hit_starts_from_its_copy_which_is_pinned_until_the_row_is_launched() -> None:
    pool = pool_with_copies(70, 71, num_slots=3, max_residents=1)
    pool.settle((1, 0), 70)
    # Of two slots for copies one is pinned, the other is all that there is.
    assert list(pool.keep([72, 73])) == [73]
    assert copies(pool) == [70, 73]
    slot, source, is_new = pool.start_row((1, 0))
    assert (source, is_new) == (0, True)
    assert slot not in (source, ZERO)
    assert list(pool.keep([72, 74])) == [72, 74]


def test_a_copy_that_cannot_be_pinned_beside_others_is_taken_over() -> None:
    pool = pool_with_copies(70, 71, num_slots=3, max_residents=2)
    pool.settle((1, 0), 70)
    pool.settle((2, 0), 71)
    assert pool.start_row((2, 0)) == (1, 1, True)
    assert copies(pool) == [70]
    # One more row from a copy that is pinned anyway needs nothing; nor could another copy be pinned.
    pool.leave((2, 0))
    pool.settle((3, 0), 70)
    assert pool.start_row((3, 0)).source == 0


def test_the_least_recently_used_copy_gives_way_and_a_hit_or_a_repetition_is_a_use() -> None:
    pool = pool_with_copies(70, 71, 72, 73, num_slots=5, max_residents=1)
    pool.settle((1, 0), 70)
    pool.start_row((1, 0))
    assert pool.keep([71]) == {}
    pool.keep([74, 75])
    assert copies(pool) == [70, 71, 74, 75]


def test_of_too_many_copies_of_one_row_the_deepest_are_kept() -> None:
    pool = pool_with_copies(70, num_slots=3, max_residents=1)
    pool.settle((1, 0), None)
    kept = pool.keep([71, 72, 73, 74])
    assert list(kept) == [73, 74]
    assert len(set(kept.values())) == 2


def test_the_deepest_copy_of_a_path() -> None:
    pool = pool_with_copies(70, 72)
    names = [70, 71, 72, 73]
    assert [pool.find_deepest(names, 0, last) for last in range(5)] == [0, 1, 1, 3, 3]
    assert pool.find_deepest(names, 3, 4) == 3


def test_a_restart_moves_the_pin() -> None:
    pool = pool_with_copies(70, 71, num_slots=4, max_residents=2)
    pool.settle((1, 0), 70)
    assert pool.restart((1, 0), 71)
    assert pool.start_row((1, 0)).source == 1
    pool.settle((2, 0), 70)
    full = pool_with_copies(70, 71, num_slots=3, max_residents=2)
    full.settle((1, 0), 70)
    assert not full.restart((1, 0), 71)
    assert full.start_row((1, 0)).source == 0


def test_a_promise_becomes_a_copy_once_its_block_has_a_name() -> None:
    pool = StatePool(4, 1)
    pool.settle((1, 0), None)
    pool.start_row((1, 0))
    assert pool.promise((1, 0), 2) == (0, 1)
    pool.fulfil((1, 0), [70], {70})
    assert pool.num_copies == 0
    pool.fulfil((1, 0), [70, 71], {70, 71})
    assert copies(pool) == [71]
    # One for a block that did not come into the tree, and one whose sequence leaves, are free again.
    pool.promise((1, 0), 3)
    pool.fulfil((1, 0), [70, 71, 72], {70, 71})
    pool.promise((1, 0), 4)
    pool.leave((1, 0))
    assert sorted(pool.snapshot().free) == [0, 2, 3]


def test_a_promise_that_is_not_fulfilled_yet_gives_its_slot_to_the_next() -> None:
    pool = StatePool(3, 1)
    pool.settle((1, 0), None)
    assert pool.promise((1, 0), 1) == pool.promise((1, 0), 2)
    pool.fulfil((1, 0), [70], {70})
    assert pool.num_copies == 0


def test_no_promise_takes_the_slot_of_a_resident_to_come() -> None:
    pool = StatePool(3, 2)
    for request in (1, 2):
        pool.settle((request, 0), None)
    assert pool.promise((1, 0), 1) is not None
    assert pool.promise((2, 0), 1) is None
    pool.leave((2, 0))
    assert pool.promise((1, 0), 2) is not None
    pool.settle((3, 0), None)


def test_problems_are_found() -> None:
    pool = pool_with_copies(70)
    assert pool.problems([], {70}) == []
    assert "copies hang on blocks [70]" in pool.problems([], {})[0]
    assert "not the residents" in pool.problems([(1, 0)], {70})[0]
    pool._free.pop()
    assert "lost or given twice" in pool.problems([], {70})[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda pool: pool.keep([80]),
        lambda pool: pool.settle((9, 0), 70),
        lambda pool: pool.drop(71),
        lambda pool: pool.find_deepest([71], 0, 1),
    ],
)
def test_the_digest_stands_for_what_every_slot_is(change: Any) -> None:
    pool, same = pool_with_copies(70, 71), pool_with_copies(70, 71)
    assert pool.digest == same.digest
    before = msgspec.json.encode(pool.snapshot())
    change(pool)
    assert (pool.digest == same.digest) == (msgspec.json.encode(pool.snapshot()) == before)


class AnyUse(RuleBasedStateMachine):
    """Residents come, launch rows, keep copies and leave; blocks, named 1 to 12, come into the tree and go."""

    @initialize(max_residents=st.integers(1, 4), num_more=st.integers(1, 4))
    def start(self, max_residents: int, num_more: int) -> None:
        self.max_residents = max_residents
        self.pool = StatePool(max_residents + num_more, max_residents)
        self.residents: dict[tuple[int, int], list[int]] = {}
        self.tree: set[int] = set()
        self.num_arrived = 0

    @precondition(lambda self: len(self.residents) < self.max_residents)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([None, *copies(self.pool)]))
        self.num_arrived += 1
        self.pool.settle((self.num_arrived, 0), name)
        self.residents[self.num_arrived, 0] = []

    @precondition(lambda self: self.residents)
    @rule(data=st.data(), names=st.lists(st.integers(1, 12), unique=True, max_size=5))
    def launch(self, data: st.DataObject, names: list[int]) -> None:
        resident = data.draw(st.sampled_from(list(self.residents)))
        if (there := copies(self.pool)) and data.draw(st.booleans()):
            self.pool.restart(resident, data.draw(st.sampled_from(there)))
        slot, _, _ = self.pool.start_row(resident)
        self.tree |= set(names)
        assert slot not in self.pool.keep(names).values()

    @precondition(lambda self: self.residents)
    @rule(data=st.data(), is_named=st.booleans())
    def decode(self, data: st.DataObject, is_named: bool) -> None:
        resident = data.draw(st.sampled_from(list(self.residents)))
        names = self.residents[resident]
        self.pool.promise(resident, len(names) + 1)
        if is_named:
            names.append(data.draw(st.integers(1, 12)))
            self.pool.fulfil(resident, names, self.tree)

    @precondition(lambda self: self.residents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        resident = data.draw(st.sampled_from(list(self.residents)))
        del self.residents[resident]
        self.pool.leave(resident)

    @rule(name=st.integers(1, 12))
    def drop(self, name: int) -> None:
        # The blocks of a row to be launched are held.
        pinned = [residence.pinned for *_, residence in self.pool.snapshot().residents]
        if dict(self.pool.snapshot().copies).get(name) not in pinned:
            self.tree.discard(name)
            self.pool.drop(name)

    @rule()
    def go_on_from_a_snapshot(self) -> None:
        taken = msgspec.json.encode(self.pool.snapshot())
        restored = StatePool(self.pool.num_slots, self.max_residents)
        restored.restore(msgspec.json.decode(taken, type=StatesSnapshot))
        assert restored.digest == self.pool.digest
        self.pool = restored

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.pool.problems(list(self.residents), self.tree) == []


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40)
