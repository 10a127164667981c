"""The host's clock."""

from __future__ import annotations

import time

from eventlm.system.clock import SystemClock


def test_its_readings_are_those_of_the_host() -> None:
    clock = SystemClock()
    before = time.monotonic_ns(), time.time_ns()
    read = clock.monotonic_ns(), clock.unix_ns()
    after = time.monotonic_ns(), time.time_ns()
    assert before[0] <= read[0] <= after[0]
    assert before[1] <= read[1] <= after[1]
