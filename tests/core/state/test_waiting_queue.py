"""A queue against a naive sorted list, under static and dynamic keys."""

from __future__ import annotations

import random

import pytest

from eventlm.core.state.sequence import Sequence
from eventlm.core.state.waiting_queue import WaitingQueue
from tests.core.rig import arrival
from tests.policies.views import view


def new_sequence(request: int, index: int = 0, priority: int = 0) -> Sequence:
    made = arrival(4, 4, s=request, priority=priority)
    return Sequence(made, index, view(request=request, index=index, priority=priority))


def static_queue() -> WaitingQueue:
    """A queue whose heap keeps keys, as under a static policy."""
    queue = WaitingQueue()
    first = new_sequence(10**9)
    queue.add(first, 0)
    queue.remove(first)
    return queue


class Naive:
    """What the queue must do: a list, sorted whenever somebody looks."""

    def __init__(self) -> None:
        self.keys: dict[Sequence, int] = {}
        self.passed: list[Sequence] = []

    def order(self) -> list[Sequence]:
        waiting = [sequence for sequence in self.keys if sequence not in self.passed]
        return sorted(waiting, key=lambda s: (s.view.priority, self.keys[s], s.request, s.index))


@pytest.mark.parametrize("seed", range(40))
def test_random_use_under_keys_that_never_change(seed: int) -> None:
    rng = random.Random(seed)
    queues, naives = [static_queue(), static_queue()], [Naive(), Naive()]
    pool = [new_sequence(request, index, rng.choice([-1, 0, 0, 2])) for request in range(12) for index in range(2)]
    keys = {sequence: rng.randint(0, 5) for sequence in pool}
    for _ in range(400):
        chosen, action = rng.choice(pool), rng.random()
        home = next((position for position, naive in enumerate(naives) if chosen in naive.keys), None)
        if action >= 0.5:
            _plan(rng, queues[0], naives[0])
        elif home is None:
            home = rng.randrange(2)
            if rng.random() < 0.3:
                keys[chosen] = rng.randint(0, 5)
            queues[home].add(chosen, keys[chosen])
            naives[home].keys[chosen] = keys[chosen]
        else:
            # It leaves a stale entry behind, and may come back here or in the other queue.
            queues[home].remove(chosen)
            del naives[home].keys[chosen]
        for queue, naive in zip(queues, naives, strict=True):
            _compare(queue, naive)


def _plan(rng: random.Random, queue: WaitingQueue, naive: Naive) -> None:
    """Look at some of the line, admit some of it, then put back what was passed over."""
    for _ in range(rng.randint(1, 5)):
        order = naive.order()
        candidate = queue.peek()
        assert (candidate.sequence if candidate else None) is (order[0] if order else None)
        if candidate is None:
            break
        if rng.random() < 0.2:
            queue.remove(candidate.sequence)
            del naive.keys[candidate.sequence]
        else:
            queue.pass_over()
            naive.passed.append(candidate.sequence)
    queue.end_plan()
    naive.passed.clear()


def _compare(queue: WaitingQueue, naive: Naive) -> None:
    assert len(queue) == len(naive.keys)
    assert queue.members == sorted(naive.keys, key=lambda s: s.id)
    assert queue.num_tokens == sum(sequence.num_tokens for sequence in naive.keys)
    order, candidate = naive.order(), queue.peek()
    if not order:
        assert candidate is None
        return
    assert candidate is not None
    first = order[0]
    assert candidate.sequence is first
    assert candidate.urgency == (first.view.priority, naive.keys[first], first.request, first.index)


@pytest.mark.parametrize("seed", range(40))
def test_random_use_under_keys_of_the_round(seed: int) -> None:
    rng = random.Random(seed)
    queue, naive = WaitingQueue(), Naive()
    pool = [new_sequence(request, 0, rng.choice([0, 0, 1])) for request in range(20)]
    for _ in range(300):
        chosen = rng.choice(pool)
        if chosen in naive.keys and rng.random() < 0.5:
            queue.remove(chosen)
            del naive.keys[chosen]
        elif chosen not in naive.keys:
            naive.keys[chosen] = rng.randint(-3, 3)
            queue.add(chosen, naive.keys[chosen])
        if rng.random() < 0.5:
            # The next round: everybody has another key.
            naive.keys = {sequence: rng.randint(-3, 3) for sequence in queue.members}
            queue.order_by([naive.keys[sequence] for sequence in queue.members])
        if rng.random() < 0.5:
            _plan(rng, queue, naive)
        _compare(queue, naive)


def test_lower_keys_and_priorities_go_first() -> None:
    # A heap whose comparator was inverted served the least urgent first.
    queue = static_queue()
    late, early, urgent = new_sequence(1), new_sequence(2), new_sequence(3, priority=-1)
    queue.add(late, 9)
    queue.add(early, 5)
    assert queue.peek() == ((0, 5, 2, 0), early)
    queue.add(urgent, 100)
    assert queue.peek() == ((-1, 100, 3, 0), urgent)


def test_coming_back_with_another_key_leaves_no_trace_of_the_first() -> None:
    # Keys that change inside a heap broke its order.
    queue, other = static_queue(), static_queue()
    moved, steady = new_sequence(1), new_sequence(2)
    queue.add(moved, 1)
    queue.add(steady, 5)
    queue.remove(moved)
    other.add(moved, 7)
    assert queue.peek() == ((0, 5, 2, 0), steady)
    other.remove(moved)
    queue.add(moved, 9)
    assert queue.peek() == ((0, 5, 2, 0), steady)
    queue.remove(steady)
    assert queue.peek() == ((0, 9, 1, 0), moved)


def test_entries_of_those_that_left_do_not_pile_up() -> None:
    queue = static_queue()
    first = new_sequence(0)
    queue.add(first, -1)
    for request in range(1, 2000):
        sequence = new_sequence(request)
        queue.add(sequence, request)
        queue.remove(sequence)
    assert len(queue._heap or []) < 200
    assert queue.peek() == ((0, -1, 0, 0), first)


def test_the_digest_is_that_of_the_members_whatever_the_way() -> None:
    one, two = static_queue(), static_queue()
    a, b, c = new_sequence(1), new_sequence(2), new_sequence(3)
    for sequence in (a, b, c):
        one.add(sequence, 0)
    one.remove(c)
    digest = one.digest
    for sequence in (a, b):
        one.remove(sequence)
    for sequence in (b, a):
        two.add(sequence, 0)
    assert two.digest == digest
    assert one.digest == 0


@pytest.mark.parametrize("is_static", [True, False])
def test_the_whole_line_in_order(is_static: bool) -> None:
    queue = static_queue() if is_static else WaitingQueue()
    members = [new_sequence(request, priority=priority) for request, priority in ((1, 0), (2, 0), (3, -1), (4, 0))]
    for sequence, key in zip(members, (7, 5, 9, 5), strict=True):
        queue.add(sequence, key)
    assert [candidate.urgency for candidate in queue.in_order()] == [
        (-1, 9, 3, 0),
        (0, 5, 2, 0),
        (0, 5, 4, 0),
        (0, 7, 1, 0),
    ]
    queue.remove(members[1])
    assert [candidate.sequence for candidate in queue.in_order()] == [members[2], members[3], members[0]]
    assert queue.peek() == queue.in_order()[0]
