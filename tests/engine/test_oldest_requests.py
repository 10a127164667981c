"""The oldest requests of a running engine: who is listed, in which order, and why each waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.core.state.snapshot import take
from eventlm.engine.admin import Pause, Resume
from eventlm.engine.oldest_requests import MAX_LISTED, ListedSequence, oldest_requests
from eventlm.engine.request import EngineUnavailableError
from eventlm.events import BackendDown, RetrySet
from tests.core.rig import Rig, arrival
from tests.core.test_forwarding import Backends
from tests.engine.engines import SLOW, Reader, recorded, request, running, verified


def identities(listed: list[ListedSequence]) -> list[tuple[int, int]]:
    return [(each.request, each.index) for each in listed]


def causes(listed: list[ListedSequence]) -> list[str | None]:
    return [each.wait.cause if each.wait is not None else None for each in listed]


def test_the_oldest_are_listed_with_why_they_wait() -> None:
    rig = Rig(max_num_seqs=2, max_steps_in_flight=1)
    first, second, *waiting = rig.arrive_all(arrival(), arrival(), arrival(n=2), arrival(priority=3), arrival())
    before = take(rig.state)
    found = oldest_requests(rig.state, rig.now_ns + 7, limit=3)
    assert take(rig.state) == before
    assert identities(found.running) == [(first, 0), (second, 0)]
    assert identities(found.waiting) == [(waiting[0], 0), (waiting[0], 1), (waiting[1], 0)]
    assert causes(found.running) == [None, None]
    assert causes(found.waiting) == ["sequence_limit"] * 3
    assert [each.state for each in found.waiting] == ["waiting"] * 3
    assert {each.age_ns for each in found.waiting} == {rig.now_ns + 7 - rig.sequence(first).arrival.ts}
    assert (found.waiting[2].priority, found.waiting[2].replica, found.running[0].replica) == (3, -1, 0)
    assert (found.num_waiting, found.num_requests) == (4, 5)
    assert found.running[0].num_blocks == len(rig.sequence(first).block_table)
    # Another drain, in which nothing was planned.
    rig.arrive()
    assert causes(oldest_requests(rig.state, rig.now_ns, limit=9).waiting) == [
        *["sequence_limit"] * 4,
        "steps_in_flight",
    ]


def test_no_more_are_listed_than_is_allowed() -> None:
    rig = Rig(up=False)
    for _ in range(MAX_LISTED + 5):
        rig.arrive(offline=True)
    found = oldest_requests(rig.state, 0, limit=10**6)
    assert len(found.waiting) == MAX_LISTED
    assert set(causes(found.waiting)) == {"worker"}
    assert found.waiting[0].age_ns == 0


def test_a_preempted_one_waits_and_says_so() -> None:
    rig = Rig(max_num_seqs=1)
    victim = rig.arrive(4, 8)
    rig.arrive(4, 8, priority=-1)
    rig.complete()
    rig.complete()
    found = oldest_requests(rig.state, rig.now_ns, limit=9)
    [listed] = [each for each in found.waiting if each.request == victim]
    assert (listed.state, listed.num_restarts, causes([listed])) == ("preempted", 1, ["sequence_limit"])


def test_of_backends_it_says_which_has_no_room_and_when_the_next_attempt_is_due() -> None:
    rig = Backends(1, limit=1)
    failed, sent, waiting = rig.arrive(), rig.arrive(), rig.arrive()
    rig.fail(failed)
    found = oldest_requests(rig.state, rig.now_ns + 5, limit=9)
    assert (identities(found.running), identities(found.waiting)) == ([(sent, 0)], [(failed, 0), (waiting, 0)])
    assert causes(found.running + found.waiting) == [None, "backoff", "backend_limit"]
    backoff = found.waiting[0]
    [retry] = rig.of(RetrySet)
    assert backoff.wait is not None
    assert (backoff.wait.remaining_ns, backoff.state) == (retry.due_ns - rig.now_ns - 5, "waiting")
    assert (backoff.num_restarts, found.running[0].num_blocks, found.replicas) == (1, 0, [])
    rig.feed(BackendDown(replica=0, epoch=1, reason="drained"))
    assert causes(oldest_requests(rig.state, rig.now_ns, limit=9).waiting) == ["backoff", "backend"]


async def test_of_an_engine_and_looking_changes_nothing(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake=SLOW, max_num_seqs=1) as engine:
        readers = [Reader(handle) for handle in await engine.submit([request(6), request(6, seed=6)])]
        await readers[0].until_tokens(2)
        found = await engine.list_oldest(5)
        assert (len(found.running), len(found.waiting), causes(found.waiting)) == (1, 1, ["sequence_limit"])
        assert found.running[0].output_tokens >= 2
        await engine.administer(Pause())
        for _ in range(20):
            paused = await engine.list_oldest(5)
        assert causes(paused.waiting) == ["paused"]
        assert paused.paused
        await engine.administer(Resume())
        for reader in readers:
            await reader.done()
        assert (await engine.list_oldest(5)).waiting == []
    verified(engine)
    assert len(recorded(engine)) < 60
    with pytest.raises(EngineUnavailableError):
        await engine.list_oldest(5)
