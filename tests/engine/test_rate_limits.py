"""Limits of keys: buckets that fill without a break, charges that are corrected, refusals that cost nothing."""

from __future__ import annotations

import random

import pytest

from eventlm.engine.rate_limits import (
    MINUTE_NS,
    NO_LIMITS,
    BucketState,
    Charge,
    RateLimiter,
    RateLimitError,
    RateLimits,
    RateLimitState,
)

SECOND = 1_000_000_000
PER_MINUTE = RateLimits(requests_per_minute=6, tokens_per_minute=600)


def refused(limiter: RateLimiter, limits: RateLimits, num_tokens: int, now_ns: int) -> RateLimitError:
    with pytest.raises(RateLimitError) as raised:
        limiter.charge("a", limits, num_tokens, now_ns)
    return raised.value


def test_requests_per_minute() -> None:
    limiter = RateLimiter()
    for used in range(1, 7):
        charge = limiter.charge("a", PER_MINUTE, 10, 0)
        assert charge.state.requests == BucketState(limit=6, remaining=6 - used, reset_ns=used * 10 * SECOND)
    error = refused(limiter, PER_MINUTE, 10, 0)
    assert (error.kind, error.retry_ns) == ("requests", 10 * SECOND)
    assert error.state.requests == BucketState(limit=6, remaining=0, reset_ns=MINUTE_NS)
    assert "limit of 6 requests per minute" in str(error)
    assert refused(limiter, PER_MINUTE, 10, 10 * SECOND - 1).retry_ns == 1
    limiter.charge("a", PER_MINUTE, 10, 10 * SECOND)
    # Somebody else has an account of their own.
    limiter.charge("b", PER_MINUTE, 10, 0)


def test_tokens_are_taken_at_their_most_and_corrected() -> None:
    limiter = RateLimiter()
    charge = limiter.charge("a", PER_MINUTE, 500, 0)
    error = refused(limiter, PER_MINUTE, 200, 0)
    assert (error.kind, error.retry_ns) == ("tokens", 10 * SECOND)
    charge.settle(50)
    # Only the first end counts.
    charge.settle(0)
    charge.refund()
    again = limiter.charge("a", PER_MINUTE, 200, 0)
    assert again.state.tokens == BucketState(limit=600, remaining=350, reset_ns=25 * SECOND)


def test_a_refusal_costs_nothing_and_neither_does_a_refund() -> None:
    limiter = RateLimiter()
    limits = RateLimits(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1)
    for _ in range(5):
        limiter.charge("a", limits, 100, 0).refund()
        assert refused(limiter, limits, 101, 0).kind == "tokens"
    assert limiter.charge("a", limits, 100, 0).state.tokens == BucketState(100, 0, MINUTE_NS)


def test_what_can_never_be_admitted_is_not_asked_to_wait() -> None:
    error = refused(RateLimiter(), PER_MINUTE, 601, 0)
    assert (error.kind, error.retry_ns) == ("tokens", 0)
    assert "up to 601 tokens" in str(error)
    assert "600 tokens per minute" in str(error)


def test_requests_at_once() -> None:
    limiter, limits = RateLimiter(), RateLimits(concurrent_requests=2)
    first, _ = limiter.charge("a", limits, 9, 0), limiter.charge("a", limits, 9, 0)
    assert first.state == RateLimitState()
    error = refused(limiter, limits, 9, 0)
    assert (error.kind, error.retry_ns) == ("requests", SECOND)
    assert "2 requests at once" in str(error)
    one = RateLimits(concurrent_requests=1)
    assert "limit of 1 request at once" in str(refused(limiter, one, 9, 0))
    first.settle(9)
    limiter.charge("a", limits, 9, 0)


def test_what_makes_nothing_new_counts_as_a_request_only() -> None:
    limits = RateLimits(requests_per_minute=3, tokens_per_minute=10, concurrent_requests=1)
    limiter = RateLimiter()
    limiter.charge("a", limits, 10, 0)
    for _ in range(2):
        limiter.count("a", limits, 0)
    with pytest.raises(RateLimitError, match="3 requests per minute") as caught:
        limiter.count("a", limits, 0)
    assert caught.value.retry_ns == MINUTE_NS // 3
    limiter.count("a", limits, MINUTE_NS // 3)
    limiter.count("b", NO_LIMITS, 0)
    assert len(limiter) == 1


def test_the_longer_of_two_waits_is_returned() -> None:
    limiter = RateLimiter()
    limits = RateLimits(requests_per_minute=2, tokens_per_minute=60)
    limiter.charge("a", limits, 60, 0)
    limiter.charge("a", limits, 0, 0)
    error = refused(limiter, limits, 60, 0)
    assert (error.kind, error.retry_ns) == ("tokens", 60 * SECOND)


def test_limits_that_change_keep_what_was_used() -> None:
    limiter = RateLimiter()
    limiter.charge("a", RateLimits(requests_per_minute=10), 0, 0)
    charge = limiter.charge("a", RateLimits(requests_per_minute=100, tokens_per_minute=5), 5, 0)
    assert charge.state.requests == BucketState(100, 89, 6_600_000_000)
    assert charge.state.tokens == BucketState(5, 0, MINUTE_NS)
    limiter.charge("a", RateLimits(), 10**9, 0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    limiter, limits = RateLimiter(), RateLimits(requests_per_minute=1)
    limiter.charge("a", limits, 0, 50 * SECOND)
    assert refused(limiter, limits, 0, 0).retry_ns == MINUTE_NS
    assert refused(limiter, limits, 0, 50 * SECOND).retry_ns == MINUTE_NS


def test_owners_with_a_full_bucket_are_forgotten() -> None:
    limiter, limits = RateLimiter(), RateLimits(requests_per_minute=60)
    running = limiter.charge("running", limits, 0, 0)
    for owner in range(3000):
        limiter.charge(str(owner), limits, 0, owner * SECOND).settle(0)
    assert len(limiter) <= 1024
    running.settle(0)


def attempt(limiter: RateLimiter, limits: RateLimits, num_tokens: int, now_ns: int) -> Charge | RateLimitError:
    try:
        return limiter.charge("a", limits, num_tokens, now_ns)
    except RateLimitError as error:
        return error


@pytest.mark.parametrize("seed", range(20))
def test_no_minute_sees_more_than_a_minute_and_a_full_bucket(seed: int) -> None:
    """Over any span nobody gets more than the bucket and what has come since; and who waits as told is admitted."""
    rng = random.Random(seed)
    limiter = RateLimiter()
    limits = RateLimits(
        requests_per_minute=rng.randint(1, 50),
        tokens_per_minute=rng.randint(50, 5000),
        concurrent_requests=rng.randint(1, 5),
    )
    now_ns, used, open_charges = 0, [], []
    for _ in range(400):
        now_ns += rng.choice([0, 1, 10**6, 10**9, 10**10])
        num_tokens = rng.randint(1, limits.tokens_per_minute)
        charge = attempt(limiter, limits, num_tokens, now_ns)
        if isinstance(charge, RateLimitError):
            assert charge.retry_ns > 0
            if len(open_charges) < limits.concurrent_requests:
                now_ns += charge.retry_ns
                limiter.charge("a", limits, num_tokens, now_ns).refund()
            else:
                open_charges.pop(rng.randrange(len(open_charges)))[0].settle(0)
            continue
        actual = rng.randint(0, num_tokens)
        open_charges.append((charge, actual))
        used.append((now_ns, num_tokens))
        assert len(open_charges) <= limits.concurrent_requests
        if rng.random() < 0.5:
            for running, num_used in open_charges:
                running.settle(num_used)
            open_charges.clear()
    for first in range(0, len(used), 7):
        start_ns = used[first][0]
        for last in range(first, len(used)):
            span_ns = used[last][0] - start_ns
            assert last - first + 1 <= limits.requests_per_minute * (1 + span_ns / MINUTE_NS) + 1e-6
