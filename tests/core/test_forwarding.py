"""Sequences that are forwarded to other servers: who goes where, what is tried again, and what that may cost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eventlm.config.core import Forwarding
from eventlm.core.forwarding import MOST_BACKOFF_NS
from eventlm.core.plugin import Router
from eventlm.core.state import snapshot
from eventlm.errors import InvariantError
from eventlm.events import (
    Arrived,
    BackendDown,
    BackendState,
    BackendUp,
    Cancelled,
    Decision,
    Fact,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Paused,
    Recovered,
    RetrySet,
    Streamed,
    TimerDue,
    Withdrawn,
)
from eventlm.policies.edf import Edf
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.pull import Pull
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import MILLISECOND, Rig, arrival

SECOND = 1000 * MILLISECOND
Name = tuple[int, int, int]
ACTIONS = ("arrive", "arrive", "stream", "stream", "end", "fail", "cancel", "down", "up", "state", "recover")


class Backends(Rig):
    """A core whose replicas are other servers. under_way: the attempts that count, by (request, index, attempt), with
    their servers.
    """

    def __init__(self, num: int = 2, *, limit: int = 0, forwards: Forwarding | None = None, **more: Any) -> None:
        self.under_way: dict[Name, int] = {}
        super().__init__(num_replicas=num, forwards=forwards or Forwarding(), up=False, **more)
        self.feed(*(self.up(index, limit=limit) for index in range(num)))

    def up(self, replica: int, *, epoch: int = 1, limit: int = 0, weight_ppm: int = 1_000_000) -> BackendUp:
        name = f"host:{8000 + replica}"
        return BackendUp(replica=replica, epoch=epoch, name=name, max_concurrency=limit, weight_ppm=weight_ppm)

    def feed(self, *facts: Fact, at: int = 0) -> list[Decision]:
        for fact in facts:
            if isinstance(fact, Recovered):
                self.under_way.clear()
            if isinstance(fact, ForwardEnded | ForwardFailed):
                self.under_way.pop((fact.request, fact.index, fact.attempt), None)
        super().feed(*facts, at=at)
        for decision in self.last:
            if isinstance(decision, Forwarded):
                self.under_way[decision.request, decision.index, decision.attempt] = decision.replica
            elif isinstance(decision, Withdrawn):
                del self.under_way[decision.request, decision.index, decision.attempt]
            elif isinstance(decision, Finished):
                ended = [name for name in self.under_way if name[:2] == (decision.request, decision.index)]
                for name in ended:
                    del self.under_way[name]
        return self.last

    def latest(self, request: int, index: int = 0) -> Name:
        """The latest attempt of a sequence that is under way."""
        return max(name for name in self.under_way if name[:2] == (request, index))

    def stream(self, request: int, num_tokens: int = 1, *, attempt: int = 0) -> list[Decision]:
        name = (request, 0, attempt) if attempt else self.latest(request)
        return self.feed(Streamed(rows=[(*name, num_tokens)]))

    def end(self, request: int, num_tokens: int = 4, **more: Any) -> list[Decision]:
        number = self.latest(request)[2]
        return self.feed(
            ForwardEnded(request=request, index=0, attempt=number, reason="stop", num_tokens=num_tokens, **more)
        )

    def fail(self, request: int, kind: Any = "server", **more: Any) -> list[Decision]:
        number = self.latest(request)[2]
        return self.feed(ForwardFailed(request=request, index=0, attempt=number, kind=kind, **more))

    def wait(self) -> list[Decision]:
        """The next timer is due."""
        due_ns = self.core.next_timer_ns
        assert due_ns is not None
        return self.feed(TimerDue(due_ns=due_ns), at=max(due_ns, self.now_ns + 1))

    def limit(self, replica: int = 0) -> int:
        capacity = self.state.replicas[replica].capacity
        assert capacity is not None
        return capacity.limit


def test_the_server_with_the_least_load_is_sent_the_most_urgent() -> None:
    rig = Backends(limit=2, policy=Edf())
    long = rig.arrive(prompt_tokens=40)
    assert rig.of(Forwarded)[0].replica == 0
    short = rig.arrive(prompt_tokens=4)
    assert rig.of(Forwarded)[0].replica == 1
    for _ in range(2):
        rig.arrive(prompt_tokens=8)
    late = rig.arrive()
    urgent = rig.arrive(deadline_ns=MILLISECOND)
    assert not rig.of(Forwarded)
    rig.stream(short)
    rig.end(long)
    assert [each.request for each in rig.of(Forwarded)] == [urgent]
    rig.end(short)
    assert [each.request for each in rig.of(Forwarded)] == [late]
    assert rig.finished()[:2] == [(long, 0, "stop", 4), (short, 0, "stop", 4)]


def test_a_heavier_server_gets_more() -> None:
    rig = Backends(limit=8)
    rig.feed(rig.up(0, epoch=2, limit=8, weight_ppm=3_000_000))
    for _ in range(8):
        rig.arrive(prompt_tokens=8)
    servers = list(rig.under_way.values())
    assert (servers.count(0), servers.count(1)) == (6, 2)


def test_prefixes_go_where_they_were_sent_before() -> None:
    rig = Backends(3, router=PrefixAffinity(), limit=8)
    names = [1, 2, 3]
    first = rig.arrive(prompt_tokens=14, blocks=names)
    home = rig.of(Forwarded)[0].replica
    rig.end(first)
    others = [rig.arrive(prompt_tokens=14, blocks=[10 * n + 4, 10 * n + 5, 10 * n + 6]) for n in range(1, 6)]
    for each in others:
        rig.end(each)
    rig.arrive(prompt_tokens=14, blocks=names)
    [again] = rig.of(Forwarded)
    assert (again.replica, again.cached_tokens) == (home, 12)


def test_a_prompt_longer_than_the_cache_is_sent_all_the_same() -> None:
    rig = Backends(1, num_blocks=4, max_model_len=1000)
    request = rig.arrive(prompt_tokens=100, blocks=list(range(1, 26)))
    assert rig.of(Forwarded)
    other = rig.arrive(prompt_tokens=100, blocks=list(range(50, 75)))
    assert rig.of(Forwarded)
    rig.end(request)
    rig.end(other)
    assert len(rig.finished()) == 2


def test_counts_of_the_server_are_the_ones_that_are_reported() -> None:
    rig = Backends(1)
    request = rig.arrive()
    rig.stream(request, 2)
    [finished] = [each for each in rig.end(request, 3, prompt_tokens=9, cached_tokens=7) if isinstance(each, Finished)]
    assert (finished.position, finished.cached_tokens, finished.reason) == (3, 7, "stop")


def test_a_failed_attempt_goes_elsewhere_after_its_wait() -> None:
    rig = Backends(2)
    request = rig.arrive()
    assert rig.of(Forwarded)[0].replica == 0
    rig.fail(request)
    [retry] = rig.of(RetrySet)
    backoff_ns = retry.due_ns - rig.now_ns
    assert Forwarding().backoff_ns // 2 <= backoff_ns <= Forwarding().backoff_ns
    rig.wait()
    [again] = rig.of(Forwarded)
    assert (again.replica, again.attempt) == (1, 2)
    rig.fail(request)
    rig.wait()
    assert rig.of(Forwarded)[0].replica == 0
    rig.fail(request)
    assert rig.finished() == [(request, 0, "error", 0)]


def test_where_no_other_server_is_up_the_same_one_is_tried() -> None:
    rig = Backends(2)
    rig.feed(BackendDown(replica=1, epoch=1, reason="drained"))
    request = rig.arrive()
    rig.fail(request)
    rig.wait()
    assert rig.of(Forwarded)[0].replica == 0


def test_who_waits_for_another_server_goes_back_once_that_is_gone() -> None:
    rig = Backends(2, limit=1)
    first, second = rig.arrive(), rig.arrive()
    rig.fail(first)
    rig.wait()
    assert not rig.of(Forwarded)
    rig.feed(BackendDown(replica=1, epoch=1, reason="drained"))
    assert rig.under_way == {(first, 0, 2): 0, (second, 0, 1): 1}


def test_nobody_avoids_the_server_in_whose_line_he_is() -> None:
    rig = Backends(2, router=RoundRobin(), limit=1)
    rig.feed(BackendDown(replica=1, epoch=1, reason="drained"))
    first = rig.arrive()
    rig.fail(first)
    second = rig.arrive()
    rig.wait()
    assert rig.sequence(first).home == 0
    rig.feed(rig.up(1, epoch=2, limit=1))
    rig.end(second)
    assert rig.under_way == {(first, 0, 2): 0}


@pytest.mark.parametrize("router", [Pull(), RoundRobin(), PrefixAffinity()])
def test_no_router_sends_it_where_it_has_just_failed(router: Router) -> None:
    rig = Backends(2, router=router)
    for _ in range(4):
        request = rig.arrive(prompt_tokens=14, blocks=[1, 2, 3])
        failed_at = rig.under_way[rig.latest(request)]
        rig.fail(request)
        rig.wait()
        assert rig.under_way[rig.latest(request)] != failed_at
        rig.end(request)


def test_what_a_server_asks_for_is_added_to_the_wait() -> None:
    rig = Backends(1)
    request = rig.arrive()
    rig.fail(request, "overloaded", retry_after_ns=7 * SECOND)
    [retry] = rig.of(RetrySet)
    assert 7 * SECOND < retry.due_ns - rig.now_ns <= 7 * SECOND + Forwarding().backoff_ns


def test_another_server_is_not_waited_for() -> None:
    rig = Backends(2)
    request = rig.arrive(deadline_ns=SECOND)
    rig.fail(request, "overloaded", retry_after_ns=7 * SECOND)
    [retry] = rig.of(RetrySet)
    assert retry.due_ns - rig.now_ns <= Forwarding().backoff_ns


def test_nobody_waits_as_long_as_a_server_likes() -> None:
    rig = Backends(1)
    request = rig.arrive()
    rig.fail(request, "overloaded", retry_after_ns=MOST_BACKOFF_NS + 1)
    assert rig.finished() == [(request, 0, "error", 0)]


def test_waits_grow_and_differ_between_requests() -> None:
    rig = Backends(1, limit=8, forwards=Forwarding(max_attempts=6, retry_share_ppm=100_000_000))
    waits: dict[int, list[int]] = {rig.arrive(seed=str(n)): [] for n in range(8)}
    for _ in range(5):
        for request in waits:
            rig.fail(request)
            waits[request].append(rig.of(RetrySet)[0].due_ns - rig.now_ns)
        while rig.core.next_timer_ns is not None:
            rig.wait()
    assert all(each == sorted(each) for each in waits.values())
    assert len({each[0] for each in waits.values()}) == 8


def test_no_request_is_sent_again_that_no_server_takes() -> None:
    rig = Backends(2)
    request = rig.arrive()
    rig.fail(request, "refused", status=400)
    assert rig.finished() == [(request, 0, "error", 0)]


@pytest.mark.parametrize("can_continue", [False, True])
def test_after_tokens_only_what_can_go_on_is_sent_again(can_continue: bool) -> None:
    rig = Backends(2)
    request = rig.arrive(max_tokens=8)
    rig.stream(request, 3)
    rig.fail(request, "broken", can_continue=can_continue)
    if not can_continue:
        assert rig.finished() == [(request, 0, "error", 3)]
        return
    rig.wait()
    assert rig.of(Forwarded)[0].attempt == 2
    rig.stream(request, 4)
    rig.end(request, 8)
    assert rig.finished() == [(request, 0, "stop", 8)]


def test_no_attempt_follows_the_deadline() -> None:
    rig = Backends(1)
    request = rig.arrive(deadline_ns=SECOND)
    rig.fail(request, retry_after_ns=2 * SECOND)
    assert rig.finished() == [(request, 0, "error", 0)]


def test_retries_cost_no_more_than_their_share() -> None:
    rig = Backends(2, limit=8, forwards=Forwarding(max_attempts=2, retry_share_ppm=100_000))
    for _ in range(200):
        request = rig.arrive()
        rig.fail(request)
        if rig.of(RetrySet):
            rig.wait()
            rig.fail(request)
    retries = [each for each in rig.decisions if isinstance(each, RetrySet)]
    assert len(retries) == 10 + 200 // 10


def test_a_cancelled_request_is_not_sent_again() -> None:
    rig = Backends(1)
    request = rig.arrive()
    rig.fail(request)
    rig.feed(Cancelled(request=request))
    rig.wait()
    assert not rig.of(Forwarded)
    assert rig.finished() == [(request, 0, "cancelled", 0)]


def test_facts_of_attempts_that_do_not_count_change_nothing() -> None:
    rig = Backends(2)
    request = rig.arrive()
    rig.fail(request)
    rig.feed(Streamed(rows=[(request, 0, 1, 3), (99, 0, 1, 1)]))
    [relayed] = rig.last
    assert relayed.dropped == [0, 1]  # type: ignore[attr-defined]
    rig.feed(ForwardEnded(request=request, index=0, attempt=1, reason="stop", num_tokens=3))
    rig.feed(ForwardFailed(request=request, index=0, attempt=1, kind="server"))
    assert not rig.last
    assert not rig.finished()


def test_an_answer_does_not_shrink() -> None:
    rig = Backends(1)
    request = rig.arrive()
    rig.stream(request, 3)
    with pytest.raises(InvariantError, match="has 3 tokens of output, and then 2"):
        rig.stream(request, 2)


HEDGES = Forwarding(hedge_ns=400 * MILLISECOND)


def hedged(rig: Backends) -> int:
    """A request whose second attempt is under way, on server 1."""
    request = rig.arrive(deadline_ns=SECOND)
    rig.wait()
    [second] = rig.of(Forwarded)
    assert (second.hedge, second.replica, second.attempt) == (True, 1, 2)
    assert rig.now_ns >= rig.sequence(request).arrival.ts + 600 * MILLISECOND
    return request


@pytest.mark.parametrize("winner", [1, 2])
def test_of_two_attempts_the_first_to_answer_counts(winner: int) -> None:
    rig = Backends(2, forwards=HEDGES)
    request = hedged(rig)
    rig.stream(request, 1, attempt=winner)
    [withdrawn] = rig.of(Withdrawn)
    assert (withdrawn.attempt, withdrawn.replica) == ((2, 1) if winner == 1 else (1, 0))
    rig.feed(ForwardEnded(request=request, index=0, attempt=winner, reason="stop", num_tokens=2))
    assert rig.finished() == [(request, 0, "stop", 2)]


def test_the_first_token_of_a_hedge_is_timed_from_when_it_was_sent() -> None:
    rig = Backends(2, forwards=HEDGES)
    request = hedged(rig)
    sent_ns = rig.now_ns
    rig.feed(ForwardFailed(request=request, index=0, attempt=1, kind="connect"), at=sent_ns + SECOND)
    rig.feed(Streamed(rows=[(request, 0, 2, 1)]), at=sent_ns + 2 * SECOND)
    capacity = rig.state.replicas[1].capacity
    assert capacity is not None
    num_tokens = rig.sequence(request).prompt_tokens + 32
    assert capacity.ns_per_token == 2 * SECOND // num_tokens


@pytest.mark.parametrize("failed", [1, 2])
def test_a_failed_attempt_of_two_leaves_the_other(failed: int) -> None:
    rig = Backends(2, forwards=HEDGES)
    request = hedged(rig)
    rig.feed(ForwardFailed(request=request, index=0, attempt=failed, kind="connect"))
    assert not rig.of(RetrySet)
    rig.end(request)
    assert rig.finished() == [(request, 0, "stop", 4)]


def test_a_request_with_tokens_is_not_hedged() -> None:
    rig = Backends(2, forwards=HEDGES)
    request = rig.arrive(deadline_ns=SECOND)
    rig.stream(request)
    rig.wait()
    assert not rig.of(Forwarded)


def test_a_paused_engine_sends_no_second_attempt() -> None:
    rig = Backends(2, forwards=HEDGES)
    rig.arrive(deadline_ns=SECOND)
    rig.feed(Paused())
    rig.wait()
    assert not rig.of(Forwarded)


def test_an_unknown_limit_doubles_then_grows_by_one_and_falls_at_signs_of_a_queue() -> None:
    rig = Backends(1, forwards=Forwarding(first_limit=4), max_num_seqs=64)
    requests = [rig.arrive() for _ in range(80)]

    def end_all() -> int:
        running = sorted({name[0] for name in rig.under_way})
        for request in running:
            rig.end(request)
        return len(running)

    assert [rig.limit(), end_all(), rig.limit()] == [4, 4, 8]
    assert [end_all(), rig.limit()] == [8, 16]
    rig.feed(BackendState(replica=0, epoch=1, running=11, waiting=5))
    assert rig.limit() == 11
    end_all()
    assert rig.limit() == 12
    assert len(requests) > 40


def test_one_burst_of_refusals_lowers_the_limit_once() -> None:
    rig = Backends(1, limit=40, max_num_seqs=64)
    requests = [rig.arrive() for _ in range(40)]
    for request in requests:
        rig.fail(request, "overloaded")
    assert rig.limit() == 28


def test_slow_first_tokens_are_a_sign_of_a_queue() -> None:
    rig = Backends(1, forwards=Forwarding(first_limit=8))
    first = rig.arrive()
    rig.stream(first)
    second = rig.arrive()
    rig.feed(Streamed(rows=[(*rig.latest(second), 1)]), at=rig.now_ns + SECOND)
    assert rig.limit() == 5


def test_a_returning_server_gets_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # It takes longer than all else here.
    monkeypatch.setattr("tests.core.rig.validate", lambda state: None)
    rig = Backends(1, forwards=Forwarding(first_limit=4), max_num_seqs=256, max_queue_len=2000)
    rig.feed(BackendDown(replica=0, epoch=1, reason="5 failures in a row"))
    rig.feed(*(arrival() for _ in range(1000)))
    assert not rig.under_way
    rig.feed(rig.up(0, epoch=2))
    assert len(rig.under_way) == 4
    most = 4
    while rig.under_way:
        ends = [
            ForwardEnded(request=name[0], index=0, attempt=name[2], reason="stop", num_tokens=1)
            for name in rig.under_way
        ]
        rig.feed(*ends)
        assert len(rig.under_way) <= rig.limit()
        most = max(most, len(rig.under_way))
    assert len(rig.finished()) == 1000
    assert most > 64


def test_a_server_that_goes_keeps_what_it_has_and_gets_no_more() -> None:
    rig = Backends(2, router=RoundRobin(), limit=1)
    first, second = rig.arrive(), rig.arrive()
    third = rig.arrive()
    assert rig.sequence(third).home == 0
    rig.feed(BackendDown(replica=0, epoch=1, reason="drained"))
    assert rig.sequence(third).home == 1
    rig.end(first)
    assert not rig.of(Forwarded)
    rig.end(second)
    assert rig.of(Forwarded)[0].replica == 1


def test_replicas_with_workers_take_no_facts_of_servers() -> None:
    rig = Rig()
    with pytest.raises(InvariantError, match="replica 0 is no other server"):
        rig.feed(BackendUp(replica=0, epoch=2, name="x"))


@pytest.mark.parametrize("seed", range(40))
def test_random_troubles_lose_and_double_nothing(seed: int) -> None:
    """All invariants hold after each event; a core that goes on from a snapshot is the same core."""
    chance = random.Random(seed)
    forwards = Forwarding(
        max_attempts=chance.randint(1, 4),
        backoff_ns=chance.choice([1, 10, 1000]) * MILLISECOND,
        retry_share_ppm=chance.choice([0, 200_000, 2_000_000]),
        hedge_ns=chance.choice([0, 5, 300]) * MILLISECOND,
        first_limit=chance.randint(1, 4),
    )
    rig = Backends(
        chance.randint(1, 4),
        limit=chance.choice([0, 0, 2]),
        forwards=forwards,
        router=chance.choice([Pull(), RoundRobin(), PrefixAffinity()]),
        policy=chance.choice([None, Edf()]),
        num_blocks=chance.choice([4, 16, 64]),
        max_model_len=1000,
    )
    epochs = [1] * len(rig.state.replicas)
    shown: dict[tuple[int, int], int] = {}
    arrived: dict[int, Arrived] = {}
    due_ns: dict[tuple[int, int], int] = {}
    num_forwards = num_more = num_lost = 0
    for turn in range(300):
        action = chance.choice(ACTIONS)
        name = chance.choice(sorted(rig.under_way)) if rig.under_way else None
        if turn > 250 and name is not None:
            action = "end"
        if rig.core.next_timer_ns is not None and rig.core.next_timer_ns <= rig.now_ns + MILLISECOND:
            rig.wait()
        elif action == "arrive":
            first = chance.randint(1, 3)
            blocks = [first, 10 + first, 20 + first]
            deadline_ns = chance.choice([0, 0, 10 * MILLISECOND, SECOND])
            more: Any = {"deadline_ns": deadline_ns, "drop_if_late": bool(deadline_ns) and chance.random() < 0.5}
            rig.arrive(13, 8, blocks=blocks, n=chance.randint(1, 2), seed=str(turn), **more)
            arrived |= {seq: request.arrival for seq, request in rig.state.requests.items()}
        elif action == "stream" and name is not None:
            total = shown.get(name[:2], 0) + chance.randint(1, 2)
            rig.feed(Streamed(rows=[(*name, total)]))
            shown[name[:2]] = total
        elif action == "end" and name is not None:
            request, index, attempt = name
            total = shown.get((request, index), 0)
            rig.feed(ForwardEnded(request=request, index=index, attempt=attempt, reason="length", num_tokens=total))
        elif action == "fail" and name is not None:
            request, index, attempt = name
            kind: Any = chance.choice(["connect", "timeout", "overloaded", "server", "refused"])
            can_continue, after_ns = chance.random() < 0.5, chance.choice([0, 0, 50 * MILLISECOND])
            rig.feed(
                ForwardFailed(
                    request=request,
                    index=index,
                    attempt=attempt,
                    kind=kind,
                    retry_after_ns=after_ns,
                    can_continue=can_continue,
                )
            )
            for retry in rig.of(RetrySet):
                by_ns = arrived[request].scheduling.deadline_ns
                assert not by_ns or shown.get((request, index)) or retry.due_ns < arrived[request].ts + by_ns
                assert can_continue or not shown.get((request, index))
                replica = rig.state.replicas[retry.replica]
                if len(rig.state.replicasets[0].tally.ups) > replica.up:
                    after_ns = 0
                assert retry.due_ns >= rig.now_ns + after_ns + forwards.backoff_ns // 2
                due_ns[request, index] = retry.due_ns
        elif action == "cancel" and rig.state.requests:
            rig.feed(Cancelled(request=chance.choice(sorted(rig.state.requests))))
        elif action in ("down", "up") and turn < 250:
            replica = chance.randrange(len(epochs))
            if action == "down":
                rig.feed(BackendDown(replica=replica, epoch=epochs[replica], reason="x"))
            else:
                epochs[replica] += 1
                rig.feed(rig.up(replica, epoch=epochs[replica], limit=chance.choice([0, 1, 3])))
        elif action == "recover" and chance.random() < 0.3:
            lost = {(request, index) for request, index, _ in rig.under_way}
            balance_ppm = rig.state.replicasets[0].forwards.balance_ppm
            rig.recover()
            assert {(each.request, each.index) for each in rig.of(RetrySet)} == lost
            assert rig.state.replicasets[0].forwards.balance_ppm == balance_ppm
            num_lost += len(lost)
            due_ns |= dict.fromkeys(lost, rig.now_ns)
        elif action == "state":
            replica = chance.randrange(len(epochs))
            rig.feed(BackendState(replica=replica, epoch=epochs[replica], waiting=chance.randint(-1, 2)))
        for forwarded in rig.of(Forwarded):
            identity = (forwarded.request, forwarded.index)
            assert forwarded.running <= forwarded.limit or forwarded.hedge
            assert rig.now_ns >= due_ns.get(identity, 0)
            if forwarded.attempt == 1:
                num_forwards += 1
            else:
                num_more += 1
                deadline_ns = arrived[forwarded.request].scheduling.deadline_ns
                assert (
                    not deadline_ns or shown.get(identity) or rig.now_ns <= arrived[forwarded.request].ts + 2 * SECOND
                )
        rig.last = []
        assert num_more <= 10 + num_lost + num_forwards * forwards.retry_share_ppm // 1_000_000
        _check_restored(rig)
    ended = [(request, index) for request, index, *_ in rig.finished()]
    assert len(ended) == len(set(ended))
    rig.feed(*(rig.up(replica, epoch=epoch + 1, limit=4) for replica, epoch in enumerate(epochs)))
    while rig.state.requests:
        if rig.under_way:
            request, index, attempt = min(rig.under_way)
            total = shown.get((request, index), 0)
            rig.feed(ForwardEnded(request=request, index=index, attempt=attempt, reason="stop", num_tokens=total))
        else:
            rig.wait()
    assert not any(replica.running or replica.num_sent for replica in rig.state.replicas)


def _check_restored(rig: Backends) -> None:
    state = rig.state
    taken = snapshot.take(state)
    [replicaset] = state.replicasets
    again = snapshot.restore(replicaset.config, replicaset.plugins, taken)
    assert snapshot.take(again) == taken
    assert again.digests() == state.digests()
