"""A clock that is ahead or behind is mapped as well as the fastest round trip allows."""

from __future__ import annotations

import random

import pytest

from eventlm.system.clock_map import NUM_SAMPLES, ClockMap


@pytest.mark.parametrize("skew_ns", [0, 3_600 * 10**9, -5 * 10**9])
def test_a_skewed_clock(skew_ns: int) -> None:
    random.seed(3)
    clock, now_ns, fastest_ns = ClockMap(), 10**12, 10**9
    assert not clock.is_known
    for _ in range(50):
        there_ns, back_ns = random.randint(100, 10**6), random.randint(100, 10**6)
        clock.note(sent_ns=now_ns, there_ns=now_ns + there_ns + skew_ns, received_ns=now_ns + there_ns + back_ns)
        fastest_ns = min(fastest_ns, there_ns + back_ns)
        now_ns += 10**9
    assert clock.is_known
    assert abs(clock.to_here(now_ns + skew_ns) - now_ns) <= fastest_ns / 2


def test_a_drift_is_followed() -> None:
    clock = ClockMap()
    clock.note(sent_ns=0, there_ns=0, received_ns=2)
    for trip in range(NUM_SAMPLES):
        sent_ns = 1000 * (trip + 1)
        clock.note(sent_ns=sent_ns, there_ns=sent_ns + 505, received_ns=sent_ns + 10)
    assert clock.to_here(10_500) == 10_000
