"""The measurement of what shows between steps sees the steps."""

from __future__ import annotations

from benchmarks.run_ahead import measure


def test_a_device_that_has_the_next_step_begins_it_when_it_ends_one() -> None:
    found = measure(20_000, batch=4, num_steps=20, in_flight=2)
    assert found.num_steps >= 15
    assert found.duration == 0.02
    assert found.period >= found.duration


def test_with_one_step_in_flight_there_is_always_something_between() -> None:
    found = measure(5_000, batch=4, num_steps=20, in_flight=1)
    assert found.idle > 0
    assert found.period > found.duration
