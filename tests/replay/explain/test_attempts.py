"""Attempts in sentences."""

from __future__ import annotations

from eventlm.replay.explain.attempts import attempts_in_words
from eventlm.replay.explain.result import AttemptShare
from tests.replay.explain.test_story import MILLISECOND, made, timeline


def test_each_attempt_has_a_sentence() -> None:
    first = AttemptShare(
        number=1,
        replica=3,
        backend="http://gpu:8000",
        sent_ns=10 * MILLISECOND,
        ended_ns=30 * MILLISECOND,
        running=4,
        limit=8,
        end="overloaded",
        status=429,
        retry_after_ns=1000 * MILLISECOND,
        retry_ns=1250 * MILLISECOND,
    )
    second = AttemptShare(
        number=2,
        replica=1,
        sent_ns=1250 * MILLISECOND,
        first_ns=1300 * MILLISECOND,
        ended_ns=1400 * MILLISECOND,
        cached_tokens=16,
        num_tokens=1,
        running=1,
        limit=8,
        end="answered",
    )
    hedge = AttemptShare(number=3, replica=0, sent_ns=1260 * MILLISECOND, ended_ns=0, is_hedge=True, end="withdrawn")
    explanation = made(timeline((1400, "prefill", "first_token")), attempts=[hedge, second, first], is_forwarded=True)
    assert attempts_in_words(explanation) == (
        "Attempt 1 went to http://gpu:8000 after 10.0 ms (4 of at most 8 there), and failed after 20.0 ms (overloaded, "
        "status 429, asking to wait 1,000.0 ms); it was to be sent again 1,220.0 ms later. "
        "Attempt 2 went to replica 1 after 1,250.0 ms (1 of at most 8 there, 16 tokens of its prompt taken to be "
        "cached), brought 1 token, the first after 50.0 ms, and ended well after 150.0 ms. "
        "Attempt 3, beside the first one, went to replica 0 after 1,260.0 ms, and was withdrawn, as another one had "
        "answered."
    )
