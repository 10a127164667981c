"""When steps of a GPU began and ended, by marks that the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.worker.gpu import step as step_module
from eventlm.worker.gpu.step import GpuStep
from eventlm.worker.protocol import StepOutput


class Clock:
    """A host's clock, and a device whose clock runs like it from another beginning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.last_ns = 0
        monkeypatch.setattr(step_module.time, "monotonic_ns", lambda: self.now_ns)

    def mark(self, passed_ns: int) -> Any:
        """Set now; the device is past it then."""
        clock = self

        class Mark:
            set_ns = clock.now_ns

            def is_past(self) -> bool:
                return clock.now_ns >= passed_ns

            def wait(self) -> None:
                clock.now_ns = max(clock.now_ns, passed_ns)

            def ns_since(self, earlier: Any) -> int:
                return int(passed_ns - earlier.passed_ns)

        mark: Any = Mark()
        mark.passed_ns = passed_ns
        return mark

    def launch(self, begun_ns: int, ended_ns: int) -> GpuStep:
        """A step of the device from then to then, launched now."""
        step = GpuStep([], [], None, self.mark(begun_ns), self._settle)
        step.launched(None, self.mark(ended_ns))
        return step

    def _settle(self, step: GpuStep, drawn: list[int]) -> StepOutput:
        step.note_times(self.last_ns)
        self.last_ns = step.times_ns[1]
        return StepOutput([], [], [], {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_step_alone_takes_what_the_device_took(clock: Clock) -> None:
    clock.now_ns = 1000
    step = clock.launch(1000, 5000)
    step.finish()
    assert step.times_ns == (1000, 5000)


def test_a_step_after_another_begins_when_that_ends(clock: Clock) -> None:
    clock.now_ns = 1000
    first, second = clock.launch(1000, 5000), clock.launch(5000, 8000)
    first.finish()
    second.finish()
    assert (first.times_ns, second.times_ns) == ((1000, 5000), (5000, 8000))


def test_a_host_that_looks_late_makes_no_step_longer_or_shorter(clock: Clock) -> None:
    clock.now_ns = 1000
    first, second = clock.launch(1000, 5000), clock.launch(5000, 8000)
    # It was busy until the second was nearly done, too.
    clock.now_ns = 7500
    first.finish()
    second.finish()
    assert (first.times_ns, second.times_ns) == ((1000, 5000), (5000, 8000))


def test_what_was_seen_to_run_had_not_ended(clock: Clock) -> None:
    clock.now_ns = 1000
    # The device began later than it might have.
    step = clock.launch(3000, 7000)
    clock.now_ns = 6900
    assert not step.is_done()
    clock.now_ns = 7100
    assert step.is_done()
    step.finish()
    assert step.times_ns == (2900, 6900)


def test_steps_do_not_overlap_whatever_the_marks_say(clock: Clock) -> None:
    clock.now_ns = 1000
    first, second = clock.launch(1000, 5000), clock.launch(2000, 5100)
    first.finish()
    second.finish()
    assert second.times_ns[0] >= first.times_ns[1]
    assert second.times_ns[1] <= clock.now_ns
