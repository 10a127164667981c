"""How much another server may have at once, and what retries may cost."""

from __future__ import annotations

import pytest

from eventlm.config.core import Forwarding
from eventlm.core.state.backend_state import GIVEN_PPM, MOST_SAVED_PPM, QUEUED_NS, BackendCapacity, Forwards


def test_a_limit_doubles_until_a_queue_is_seen_and_then_grows_by_one_a_load() -> None:
    capacity = BackendCapacity(100, 4000)
    for _ in range(4):
        capacity.note_success(4)
    assert capacity.limit == 8
    capacity.note_queue(sent=5, now=6)
    assert capacity.limit_milli == 5600
    for _ in range(6):
        capacity.note_success(5)
    assert 6 <= capacity.limit_milli / 1000 < 7


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    capacity = BackendCapacity(100, 8000)
    capacity.note_success(3)
    assert capacity.limit == 8


def test_a_limit_stays_between_one_and_the_most() -> None:
    capacity = BackendCapacity(3, 2900)
    capacity.note_success(3)
    assert capacity.limit == 3
    for position in range(20):
        capacity.note_queue(sent=position + 1, now=position)
    assert capacity.limit == 1


def test_what_was_sent_before_a_decrease_is_no_sign_of_a_further_queue() -> None:
    capacity = BackendCapacity(100, 10_000)
    capacity.note_queue(sent=5, now=9)
    capacity.note_queue(sent=8, now=10)
    assert capacity.limit == 7


@pytest.mark.parametrize(
    ("num_sent", "running", "waiting", "limit"),
    [
        # All is ours: as many as run are enough.
        (16, 12, 4, 12),
        (16, 2, 14, 11),
        # Less than the limit was sent.
        (4, 1, 3, 11),
        # As good as nothing of it is ours.
        (1, 50, 20, 16),
        (0, 50, 20, 16),
        # Between two steps there is always somebody.
        (64, 64, 4, 16),
        (2, 1, 1, 16),
        (16, -1, 2, 14),
        (16, 16, 0, 16),
        (16, 16, -1, 16),
    ],
)
def test_a_limit_falls_to_what_does_not_wait(num_sent: int, running: int, waiting: int, limit: int) -> None:
    capacity = BackendCapacity(100, 16_000, running=running, waiting=waiting)
    capacity.note_waiting(num_sent, 9)
    assert capacity.limit == limit
    assert capacity.is_doubling == (limit == 16)


def test_a_limit_stays_above_what_others_have_wait_there() -> None:
    capacity = BackendCapacity(100, 16_000, running=40, waiting=10)
    for position in range(100):
        capacity.note_waiting(capacity.limit, position)
    assert capacity.limit > 4


def test_only_first_tokens_far_slower_than_the_quickest_have_queued() -> None:
    capacity = BackendCapacity(100, 10_000)
    assert not capacity.has_queued(100_000_000, 968)
    assert not capacity.has_queued(300_000_000, 968)
    assert capacity.has_queued(500_000_000, 968)
    assert not capacity.has_queued(QUEUED_NS - 1, 1)


def test_retries_are_paid_from_what_requests_earn() -> None:
    forwards = Forwards(Forwarding(retry_share_ppm=500_000))
    assert [forwards.pay() for _ in range(11)] == [True] * 10 + [False]
    forwards.earn()
    assert not forwards.pay()
    forwards.earn()
    assert forwards.pay()
    for _ in range(1000):
        forwards.earn()
    assert forwards.balance_ppm == MOST_SAVED_PPM > GIVEN_PPM
