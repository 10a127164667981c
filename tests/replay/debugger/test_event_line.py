"""Events in one line."""

from __future__ import annotations

from eventlm.events import Admitted, Arrived, Launched, Preempted
from eventlm.replay.debugger.event_line import event_line
from eventlm.scheduling_params import SchedulingParams


def test_fields_that_are_not_their_defaults() -> None:
    assert event_line(Admitted(s=5, ts=7, c=4, request=4)) == "admit request=4 (because of 4)"
    preempted = Preempted(s=9, ts=7, c=8, request=4, index=1, replica=0, reason="memory", by=(2, 0))
    assert event_line(preempted) == "preempt request=4 index=1 replica=0 reason=memory by=[2,0] (because of 8)"


def test_long_lists_are_counted() -> None:
    decodes = [(number, 0, 30, 1) for number in range(1000)]
    launched = Launched(s=9, replica=0, epoch=1, step=2, decodes=decodes, num_tokens=1000, predicted_ns=5)
    line = event_line(launched)
    assert line == "launch replica=0 epoch=1 step=2 decodes=[1,000 entries] num_tokens=1000 predicted_ns=5"


def test_nothing_steers_a_terminal() -> None:
    scheduling = SchedulingParams(model="fake", service_class="\x1b[2J\x1b[31mEVIL")
    line = event_line(Arrived(s=1, prompt_tokens=1, max_tokens=1, scheduling=scheduling))
    assert "service_class=\\x1b[2J\\x1b[31mEVIL" in line


def test_one_line_whatever_its_texts_are() -> None:
    scheduling = SchedulingParams(model="a b\nc", service_class="x" * 400)
    line = event_line(Arrived(s=1, prompt_tokens=1, max_tokens=1, scheduling=scheduling))
    assert "\n" not in line
    assert "model='a b\\nc'" in line
    assert len(line) == 150
