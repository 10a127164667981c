"""The core at any event is that of a straight replay, whatever way the cursor came."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogLine
from eventlm.errors import UsageError
from eventlm.replay.debugger import cursor as cursor_module
from eventlm.replay.debugger.cursor import CoreCursor, NoStateError
from eventlm.replay.debugger.interrupt import Interrupt, InterruptedCommandError
from eventlm.replay.index import indexer
from eventlm.replay.index.open import open_index
from tests.replay.debugger.straight import StraightReplay
from tests.replay.index.runs import GOLDEN_RUNS


def walk(generator: random.Random, events: list[int]) -> Iterator[int]:
    """Jumps, and walks forwards and backwards by single events and by several."""
    at = generator.randrange(len(events))
    while True:
        kind = generator.randrange(4)
        if kind == 0:
            at = generator.randrange(len(events))
            yield events[at]
            continue
        for _ in range(generator.randrange(1, 12)):
            step = generator.choice([1, 1, 1, 2, 7, 30]) * (1 if kind == 1 else -1)
            at = min(max(at + step, 0), len(events) - 1)
            yield events[at]


def check_walks(path: Path, num_positions: int, seed: int) -> int:
    """Returns how many positions had a state."""
    digests = StraightReplay(path).digests()
    cursor = CoreCursor(open_index(path), Interrupt())
    places = walk(random.Random(seed), list(digests))
    num_states = 0
    for _ in range(num_positions):
        s = next(places)
        if digests[s] is None:
            with pytest.raises(NoStateError):
                cursor.core_at(s)
        else:
            assert cursor.core_at(s).digests() == digests[s], s
            num_states += 1
    cursor.close()
    return num_states


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Snapshots so dense that small runs have many, and near ones nearer still."""
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path))
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 60)
    monkeypatch.setattr(cursor_module, "_NEAR_EVENTS", (3, 11))
    monkeypatch.setattr(cursor_module, "_EVENTS_PER_RESTORE", 10)


def test_random_walks_have_a_straight_replays_digests(dense: None, all_runs: list[Path]) -> None:
    for seed, path in enumerate(all_runs):
        assert check_walks(path, 30, seed) == 30


def test_where_nothing_was_recorded_there_is_no_state(dense: None, lossy_runs: list[Path]) -> None:
    for seed, path in enumerate(lossy_runs):
        unknown = [s for s, digests in StraightReplay(path).digests().items() if digests is None]
        assert unknown
        assert 30 < check_walks(path, 60, seed) <= 60
        cursor = CoreCursor(open_index(path), Interrupt())
        for s in unknown:
            with pytest.raises(NoStateError):
                cursor.core_at(s)


def test_following_goes_on_behind_a_gap(dense: None, lossy_runs: list[Path]) -> None:
    for path in lossy_runs:
        digests = StraightReplay(path).digests()
        index = open_index(path)
        cursor = CoreCursor(index, Interrupt())
        known = [s for s, each in digests.items() if each is not None]
        seen = []
        for line in cursor.follow(index.facts.first_s - 1, index.facts.next_s - 1):
            seen.append(line.s)
            assert cursor.core.digests() == digests[line.s], line.s
        assert seen == known


@pytest.mark.soak
def test_a_thousand_positions(dense: None, all_runs: list[Path], lossy_runs: list[Path]) -> None:
    for seed, path in enumerate([*all_runs, *lossy_runs]):
        check_walks(path, 1000, seed)


def test_the_distances_of_a_large_run_are_right_too(cache: None) -> None:
    assert check_walks(GOLDEN_RUNS[0], 60, 1) == 60


def test_going_back_starts_close_behind(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor_module, "_NEAR_EVENTS", (8, 40))
    index = open_index(GOLDEN_RUNS[0])
    last = index.facts.next_s - 2
    interrupt = Interrupt()
    cursor = CoreCursor(index, interrupt)
    cursor.core_at(last)
    num_checks = 0
    check = interrupt.check

    def counting() -> None:
        nonlocal num_checks
        num_checks += 1
        check()

    monkeypatch.setattr(interrupt, "check", counting)
    for s in range(last - 1, last - 6, -1):
        num_checks = 0
        cursor.core_at(s)
        assert num_checks <= 20


def test_an_interrupt_leaves_a_cursor_that_works(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = GOLDEN_RUNS[0]
    digests = StraightReplay(path).digests()
    interrupt = Interrupt()
    cursor = CoreCursor(open_index(path), interrupt)
    cursor.core_at(20)
    interrupt.request()
    with pytest.raises(InterruptedCommandError):
        cursor.core_at(100)
    assert cursor.core_at(20).digests() == digests[20]
    assert cursor.core_at(100).digests() == digests[100]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_core_that_was_left_half_way_is_not_used(
    cache: None, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = GOLDEN_RUNS[1]
    digests = StraightReplay(path).digests()
    cursor = CoreCursor(open_index(path), Interrupt())
    core = cursor.core_at(30)
    decode = LogLine.event
    monkeypatch.setattr(type(core), "apply", lambda *_: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        cursor.core_at(60)
    monkeypatch.undo()
    assert decode is LogLine.event
    assert cursor.core_at(60).digests() == digests[60]


def test_following_gives_every_line_with_its_state(cache: None) -> None:
    path = GOLDEN_RUNS[2]
    digests = StraightReplay(path).digests()
    cursor = CoreCursor(open_index(path), Interrupt())
    lines = []
    for line in cursor.follow(10, 60):
        assert cursor.core.digests() == digests[line.s]
        lines.append(line.s)
    assert lines == list(range(11, 61))


def test_a_core_for_others_is_their_own(cache: None) -> None:
    cursor = CoreCursor(open_index(GOLDEN_RUNS[0]), Interrupt())
    own = cursor.core_at(50)
    other = cursor.restored_before(50)
    assert other is not own
    assert other.next_seq <= 50


def test_a_run_that_was_not_verified_has_no_states(cache: None) -> None:
    with pytest.raises(UsageError, match="there are no states"):
        CoreCursor(open_index(GOLDEN_RUNS[0], verify=False), Interrupt())
