"""Only replicas for which something may have changed are asked in a plan, in their order."""

from __future__ import annotations

import pytest

from eventlm.core import scheduler
from eventlm.core.state.replica import Replica
from eventlm.core.state.turns import Tally, Turns
from eventlm.events import CacheFlushed, Launched, Paused, Resumed
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.lrs import Lrs
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.pull import Pull
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import Rig, arrival


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replicas that plans have asked, in order."""
    found: list[int] = []
    plan_step = scheduler.plan_step

    def noted(state: object, replica: Replica) -> bool:
        found.append(replica.index)
        return plan_step(state, replica)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler, "plan_step", noted)
    return found


@pytest.mark.parametrize("policy", [Fcfs(), Lrs()])
def test_a_completion_asks_its_replica_alone(asked: list[int], policy: Fcfs | Lrs) -> None:
    rig = Rig(router=RoundRobin(), policy=policy, num_replicas=50, max_steps_in_flight=2)
    rig.arrive_all(*(arrival(4, 9) for _ in range(40)))
    asked.clear()
    rig.complete(7)
    assert set(asked) == {7}
    asked.clear()
    rig.arrive(4, 9)
    assert set(asked) == {40}


def test_of_those_that_could_take_from_the_shared_queue_the_rest_is_asked_no_more_once_it_is_empty(
    asked: list[int],
) -> None:
    rig = Rig(router=Pull(), num_replicas=50)
    asked.clear()
    rig.arrive(4, 9)
    assert asked == [0]
    asked.clear()
    rig.arrive_all(arrival(4, 9), arrival(4, 9, replicaset=0))
    assert asked == [1]


def test_what_nobody_can_take_is_looked_at_once(asked: list[int]) -> None:
    rig = Rig(router=Pull(), num_replicas=3, max_num_seqs=1, max_steps_in_flight=2)
    rig.arrive_all(*(arrival(4, 9) for _ in range(3)))
    asked.clear()
    rig.arrive(4, 9)
    assert asked == [0, 1, 2]
    asked.clear()
    rig.complete(1)
    assert set(asked) == {1}
    asked.clear()
    rig.feed(CacheFlushed())
    assert asked == [0, 1, 2]


def test_a_pause_loses_nothing(asked: list[int]) -> None:
    rig = Rig(router=RoundRobin(), num_replicas=3)
    rig.feed(Paused())
    asked.clear()
    rig.arrive_all(arrival(), arrival())
    assert asked == []
    rig.feed(Resumed())
    assert asked == [0, 1, 2]
    assert [launched.replica for launched in rig.of(Launched)] == [0, 1]


def test_a_router_that_asks_for_contenders_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(router=PrefixAffinity(), num_replicas=60, num_blocks=64)
    rig.arrive_all(*(arrival(40, 2, blocks=[*range(1, 9), 100 + i, 200 + i]) for i in range(60)))
    looked_at: list[int] = []
    prefix_tokens = Replica.prefix_tokens

    def noted(self: Replica, *arguments: object) -> int:
        looked_at.append(self.index)
        return prefix_tokens(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "prefix_tokens", noted)
    rig.arrive(40, 2, blocks=[*range(1, 9), 105, 205])
    assert 0 < len(looked_at) <= 3


def test_turns_go_by_admitted_tokens_and_number() -> None:
    turns = Turns()
    for replica, tokens in enumerate([9, 0, 4, 0]):
        turns.update(replica, (tokens, replica), stands=replica == 0)
    turns.begin_round({3: None, 7: None})
    every, due = [], []
    turn = (-1, -1)
    while (following := turns.after(turn, every=True)) is not None:
        every.append(turn := following)
    turn = (-1, -1)
    while (following := turns.after(turn, every=False)) is not None:
        due.append(turn := following)
    assert [replica for _, replica in every] == [1, 3, 2, 0]
    assert [replica for _, replica in due] == [3, 0]
    assert turns.standing == [0]
    turns.update(0, None, stands=True)
    turns.begin_round({})
    assert (turns.standing, turns.has_due, turns.has_room) == ([], False, True)


def test_a_tally_knows_whose_worker_is_up() -> None:
    tally = Tally()
    for replica in (2, 0, 1):
        tally.note_worker(replica, up=True)
    tally.note_worker(0, up=False)
    assert tally.ups == [1, 2]
    assert list(tally.changed) == list(tally.moved) == [2, 0, 1]
