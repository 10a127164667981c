"""Which attempts are made again, and when: for any failures in any order."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.bench.retries import MAX_BACKOFF_S, NO_RETRIES, Retries, error_kind, is_passing
from eventlm.client.errors import ClientError, ErrorKind

PASSING = [
    *(ClientError("busy", "http", status=status) for status in (408, 425, 429, 500, 502, 503, 504)),
    ClientError("refused", "connection"),
    ClientError("silent", "timeout"),
    ClientError("cut", "broken"),
]
policies = st.builds(
    Retries,
    number=st.integers(0, 12),
    backoff_s=st.floats(0, 100, allow_subnormal=False),
    max_wait_s=st.just(600.0),
    seed=st.integers(0, 2**32),
)


def waits(retries: Retries, error: ClientError, index: int = 0) -> list[float]:
    """The waits of a request whose attempts all fail."""
    made = []
    for num_failed in count(1):
        wait_s = retries.wait_s(error, index=index, num_failed=num_failed)
        if wait_s is None:
            return made
        made.append(wait_s)
    raise AssertionError


@given(policies, st.sampled_from(PASSING), st.integers(0, 1_000_000))
def test_the_budget_is_used_up_and_never_exceeded(retries: Retries, error: ClientError, index: int) -> None:
    assert len(waits(retries, error, index)) == retries.number
    assert waits(retries, error, index) == waits(retries, error, index)


@given(policies, st.integers(0, 1_000_000))
def test_the_backoff_grows_to_its_end(retries: Retries, index: int) -> None:
    made = waits(retries, PASSING[0], index)
    for num_failed, wait_s in enumerate(made, 1):
        longest_s = min(retries.backoff_s * 2 ** (num_failed - 1), MAX_BACKOFF_S)
        assert longest_s / 2 <= wait_s <= longest_s
    growing = [wait_s for num_failed, wait_s in enumerate(made) if retries.backoff_s * 2**num_failed <= MAX_BACKOFF_S]
    assert all(earlier <= later for earlier, later in pairwise(growing))


def test_ever_so_many_attempts() -> None:
    wait_s = Retries(number=10**9, backoff_s=0.2, max_wait_s=1.0).wait_s(PASSING[0], index=0, num_failed=10**8)
    assert wait_s is not None
    assert MAX_BACKOFF_S / 2 <= wait_s <= MAX_BACKOFF_S


@given(policies, st.floats(0, 600), st.integers(0, 1_000_000))
def test_nobody_comes_back_before_the_server_asked_for_it(retries: Retries, asked_s: float, index: int) -> None:
    plain = ClientError("busy", "http", status=429)
    asked = ClientError("busy", "http", status=429, retry_after_s=asked_s)
    without, made = waits(retries, plain, index), waits(retries, asked, index)
    assert made == pytest.approx([asked_s + wait_s for wait_s in without])
    assert all(wait_s >= asked_s for wait_s in made)


def test_a_wait_beyond_all_patience_is_a_failure() -> None:
    retries = Retries(number=3, backoff_s=0.1, max_wait_s=60.0)
    for asked_s, number in ((60.0, 3), (60.1, 0)):
        assert len(waits(retries, ClientError("busy", "http", status=503, retry_after_s=asked_s))) == number


def test_those_that_failed_together_come_back_apart() -> None:
    """A thousand that a server sent away for a second: no twentieth of the time has more than twice its share."""
    retries = Retries(number=1, backoff_s=1.0, max_wait_s=60.0)
    error = ClientError("busy", "http", status=429, retry_after_s=1.0)
    made = [waits(retries, error, index)[0] for index in range(1000)]
    slots = [int((wait_s - 1.5) / 0.025) for wait_s in made]
    assert set(slots) == set(range(20))
    assert max(slots.count(slot) for slot in range(20)) < 100


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("http", 400),
        ("http", 401),
        ("http", 404),
        ("http", 422),
        ("protocol", 404),
        ("protocol", None),
        ("server", None),
    ],
)
def test_what_another_attempt_does_not_change(kind: ErrorKind, status: int | None) -> None:
    error = ClientError("no", kind, status=status)
    assert not is_passing(error)
    assert waits(Retries(number=5, max_wait_s=60.0), error) == []


def test_without_retries_nothing_is_tried_again() -> None:
    assert [waits(NO_RETRIES, error) for error in PASSING] == [[]] * len(PASSING)


def test_kinds() -> None:
    assert [error_kind(error) for error in PASSING[-4:]] == ["http 504", "connection", "timeout", "broken"]
