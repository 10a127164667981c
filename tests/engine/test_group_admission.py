from __future__ import annotations

from typing import Any

import pytest

from eventlm.engine.group_admission import charge_for, metered
from eventlm.engine.rate_limits import MINUTE_NS, NO_LIMITS, RateLimiter, RateLimitError, RateLimits
from eventlm.engine.request import FinishedOutput, Submission
from eventlm.errors import EventLMError
from tests.engine.engines import request

LIMITS = RateLimits(requests_per_minute=10, tokens_per_minute=1000, concurrent_requests=2)


def left(limiter: RateLimiter) -> tuple[int, int]:
    """Requests and tokens that remain, as a request that is refunded finds them."""
    charge = limiter.charge("owner", LIMITS, 0, 0)
    charge.refund()
    assert charge.state.requests is not None
    assert charge.state.tokens is not None
    return charge.state.requests.remaining + 1, charge.state.tokens.remaining


def submission(limits: RateLimits = LIMITS) -> Submission:
    return Submission(reply_id="r", owner="owner", limits=limits)


def finished(position: int) -> FinishedOutput:
    return FinishedOutput(index=0, reason="length", position=position, cached_tokens=0)


def test_without_limits_nothing_is_charged() -> None:
    limiter = RateLimiter()
    assert charge_for(limiter, submission(NO_LIMITS), [request()], 0) is None
    assert len(limiter) == 0


def test_a_group_is_one_request_with_the_most_tokens_it_may_use() -> None:
    limiter = RateLimiter()
    group = [request(12, prompt=(1, 2, 3), n=2), request(5, prompt=(1,) * 10)]
    assert charge_for(limiter, submission(), group, 0) is not None
    assert left(limiter) == (9, 1000 - (3 + 2 * 12) - (10 + 5))


def test_a_group_that_is_too_large_counts_in_the_classes_of_its_members() -> None:
    limiter = RateLimiter()
    group = [request(900, service_class="batch"), request(900, service_class="chat")]
    with pytest.raises(RateLimitError) as caught:
        charge_for(limiter, submission(), group, 0)
    assert (caught.value.kind, caught.value.retry_ns) == ("tokens", 0)
    assert limiter.refused == {"batch": 1, "chat": 1}
    assert left(limiter) == (10, 1000)


def test_the_charge_is_corrected_when_the_last_sequence_is_over() -> None:
    limiter = RateLimiter()
    group = [request(100, n=2), request(100)]
    charge = charge_for(limiter, submission(), group, 0)
    assert charge is not None
    outputs: list[Any] = []
    first, second = metered(charge, group, [outputs.append, outputs.append])
    first(finished(4))
    second(finished(5))
    assert left(limiter)[1] == 1000 - 3 * 100 - 2 * 3
    first(finished(6))
    # Both prompts, and what was produced.
    assert left(limiter)[1] == 1000 - 2 * 3 - (4 + 5 + 6)
    assert [output.position for output in outputs] == [4, 5, 6]


def test_an_error_settles_what_was_used_until_then() -> None:
    limiter = RateLimiter()
    group = [request(100, n=2)]
    charge = charge_for(limiter, submission(), group, 0)
    assert charge is not None
    outputs: list[Any] = []
    (sink,) = metered(charge, group, [outputs.append])
    sink(finished(7))
    error = EventLMError("the engine is gone")
    sink(error)
    assert left(limiter)[1] == 1000 - 3 - 7
    assert outputs[-1] is error
    # Both that may run at once are free again.
    for _ in range(2):
        charge_for(limiter, submission(), [request(1)], MINUTE_NS)
