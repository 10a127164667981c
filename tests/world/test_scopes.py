"""Small worlds of the core, searched completely; planted defects are found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from msgspec import Struct

from eventlm.core import core as core_module
from eventlm.core import forwarding
from eventlm.core.core import Core
from eventlm.core.state import snapshot
from eventlm.core.state.block_pool import BlockPool
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.events import Fact, GrammarReady, Resumed, TextEnded
from tests.world.scopes import canonical, search
from tests.world.scopes.__main__ import main
from tests.world.scopes.canonical import digest
from tests.world.scopes.copies import CHANGED, copy, pack, unpack
from tests.world.scopes.scopes import SMALL, SOAK
from tests.world.scopes.search import Result, Search, Violation, facts_of, replay
from tests.world.scopes.world import Scope, World

SOME = ["prefix-affinity", "hedged", "late-all", "watched-all", "groups", "recurrent", "two-sets"]
SCOPES = {scope.name: scope for scope in (*SMALL, *SOAK)}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {scope.name: Search(scope).run() for scope in SMALL}


def test_nothing_is_wrong_in_any_state_of_small_worlds(results: dict[str, Result]) -> None:
    for name, result in results.items():
        print(f"{name}: {result}")
    assert all(result.is_whole and result.num_states > 500 for result in results.values())
    assert sum(result.num_twins for result in results.values()) > 10
    assert sum(result.num_restored for result in results.values()) > 20


def test_all_that_can_happen_happens(results: dict[str, Result]) -> None:
    seen: Counter[str] = sum((result.seen for result in results.values()), Counter())
    assert {
        "Closing", "Finished cancelled", "Finished deadline", "Finished error", "Finished length", "Launched",
        "Preempted admission", "Preempted lost", "Preempted memory", "RetrySet", "TimerSet", "Withdrawn",
    } <= seen.keys()  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("scope", SOAK, ids=lambda scope: scope.name)
def test_nothing_is_wrong_in_any_state_of_larger_worlds(scope: Scope) -> None:
    result = Search(scope).run()
    print(result)
    assert result.is_whole


def found(scope: Scope) -> Violation:
    with pytest.raises(Violation) as raised:
        Search(scope).run()
    return raised.value


def test_a_block_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release_all", lambda self, table: self.release(table[:0:-1]))
    violation = found(SCOPES["one-fcfs"])
    # A worker comes up, then a request arrives and is cancelled.
    assert sorted(fact.split('"')[3] for fact in facts_of(SCOPES["one-fcfs"], violation.path)) == [
        "arrive", "cancel", "worker_up",
    ]  # fmt: skip
    assert "references" in str(violation)


def test_a_wake_that_is_skipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "complete", lambda self: self.in_flight.popleft())
    assert "nothing is in flight" in str(found(SCOPES["equal"]))


@pytest.mark.parametrize(
    ("scope", "fact", "waits"),
    [
        (SCOPES["watched"], TextEnded, "CLOSING"),
        (SCOPES["watched"], GrammarReady, "WAITING_FOR_GRAMMAR"),
        (dataclasses.replace(SCOPES["equal"], chances={"pause": 1}), Resumed, "WAITING"),
    ],
    ids=["text end", "grammar", "resume"],
)
def test_a_deadlock_is_found_although_its_end_is_owed(
    monkeypatch: pytest.MonkeyPatch, scope: Scope, fact: type[Fact], waits: str
) -> None:
    """No single state shows the deadlock: the owed fact comes again and again, but wakes nothing."""

    def ignore(state: CoreState, fact: Fact) -> None: ...

    monkeypatch.setitem(core_module._HANDLERS, fact, ignore)
    violation = found(scope)
    assert "some request can end no more" in str(violation)
    assert waits in str(violation)


def test_a_retry_that_wakes_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence rests, and its timer stays due for ever."""
    monkeypatch.setattr(forwarding, "retries_due", lambda state, due_ns: None)
    scope = SCOPES["forwarded"]
    violation = found(scope)
    assert "some request can end no more" in str(violation)
    kinds = [fact.split('"')[3] for fact in facts_of(scope, violation.path)]
    assert kinds.index("forward_failed") < kinds.index("timer") == len(kinds) - 1


def test_what_goes_on_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a token may follow each other for ever, although other moves would end the request from every
    state.
    """
    moves = World.moves
    monkeypatch.setattr(
        World,
        "moves",
        lambda self: [each._replace(is_owed=each.is_owed or each.costs == "none") for each in moves(self)],
    )
    violation = found(dataclasses.replace(SCOPES["equal"], chances={"none": -1}))
    assert "may go on for ever" in str(violation)


def test_a_digest_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of_replica = canonical._of_replica

    def without_steps(*args: Any) -> Any:
        return [part for position, part in enumerate(of_replica(*args)) if position != 5]

    monkeypatch.setattr(canonical, "_of_replica", without_steps)
    monkeypatch.setattr(search, "_TWINS_EVERY", 1)
    assert "twin" in str(found(SCOPES["equal"]))


def test_a_snapshot_that_leaves_something_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_restore_timers", lambda state, timers: None)
    monkeypatch.setattr(search, "_RESTORED_EVERY", 1)
    assert "restored from a snapshot" in str(found(SCOPES["late"]))


def test_a_violation_says_how_to_reproduce_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(BlockPool, "release_all", lambda self, table: self.release(table[:0:-1]))
        assert main(["one-fcfs"]) == 1
    command = capsys.readouterr().out.partition("python -m tests.world.scopes ")[2].splitlines()[0]
    assert main(command.split()) == 0
    assert '"t":"cancel"' in capsys.readouterr().out


def test_the_command_names_the_scopes_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "one-fcfs" in capsys.readouterr().err


def test_a_path_that_there_is_not_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["equal", "--path", "0,99"]) == 2
    assert "'0,99'" in capsys.readouterr().err


def worlds(scope: Scope) -> list[World]:
    """Worlds of each depth, reached by always taking the first, the middle or the last move."""
    found = []
    for choice in (0.0, 0.5, 0.99):
        world = scope.begin()
        for _ in range(14):
            moves = world.moves()
            if not moves:
                break
            world.apply(moves[int(choice * len(moves))])
            found.append(copy(world))
    return found


@pytest.mark.parametrize("name", [*SOME, "joined"])
def test_a_copy_goes_on_alone_and_alike(name: str) -> None:
    for world in worlds(SCOPES[name]):
        before, known = digest(world), world.core.digests()
        for number in range(len(world.moves())):
            copied, unpacked = copy(world), unpack(pack(world))
            assert copied.apply(copied.moves()[number]) == unpacked.apply(unpacked.moves()[number])
            assert digest(copied) == digest(unpacked)
            assert copied.core.digests() == unpacked.core.digests()
            assert (digest(world), world.core.digests()) == (before, known)


#: Attributes of mutable types that are replaced, never changed in place.
REPLACED = {"plans", "latest_plans", "decisions", "requests", "_numbers"}


def is_fixed(value: Any) -> bool:
    """Whether no part of a value can change in place."""
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    if isinstance(value, Struct):
        return bool(value.__struct_config__.frozen)
    return value is None or isinstance(value, int | str | bytes)


@pytest.mark.parametrize("name", SOME)
def test_copies_share_only_what_never_changes(name: str) -> None:
    for world in worlds(SCOPES[name]):
        seen: dict[int, Any] = {}
        _look(world, seen)
        assert {type(each) for each in seen.values()} >= {World, Core, CoreState, BlockPool}


def _look(value: Any, seen: dict[int, Any]) -> None:
    """Check all objects that copies do not share."""
    if isinstance(value, list | tuple):
        for each in value:
            _look(each, seen)
    elif isinstance(value, dict):
        for each in value.values():
            _look(each, seen)
    elif type(value) in CHANGED and id(value) not in seen:
        seen[id(value)] = value
        changed = CHANGED[type(value)]
        for attribute in getattr(value, "__slots__", None) or vars(value):
            inner = getattr(value, attribute)
            if attribute in changed.flat:
                content = inner.values() if isinstance(inner, dict) else inner
                assert all(map(is_fixed, content)), (type(value), attribute)
            elif attribute in changed.deep:
                _look(inner, seen)
            elif attribute not in REPLACED:
                assert is_fixed(inner), (type(value), attribute)


def test_a_path_leads_to_the_same_state_again() -> None:
    scope = SCOPES["one-edf"]
    assert digest(replay(scope, [0, 0, 1])) == digest(replay(scope, [0, 0, 1]))
