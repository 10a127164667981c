from __future__ import annotations

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.events import Event, Preempted
from eventlm.replay.bisect.first_event import EventEnvironment, first_event
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import Environment
from eventlm.replay.expressions.parser import parse
from tests.replay.golden import FOLDER

GOLDEN = FOLDER / "edf_tight.jsonl"


@pytest.fixture(scope="module")
def events() -> list[Event]:
    with LogReader(GOLDEN) as log:
        return [line.event() for line in log]


def test_the_first_event_is_found(events: list[Event]) -> None:
    preemptions = [event for event in events if isinstance(event, Preempted)]
    assert len(preemptions) > 1
    found = first_event(GOLDEN, parse("event == 'preempt'"))
    assert found.event == preemptions[0]
    assert found.num_events == preemptions[0].s + 1
    last = preemptions[-1]
    later = first_event(GOLDEN, parse(f"event == 'preempt' and request == {last.request} and time >= {last.ts}ns"))
    assert later.event == last


def test_fields_lists_and_scheduling_parameters() -> None:
    launch = first_event(GOLDEN, parse("event == 'launch' and decodes > 1")).event
    assert launch is not None
    assert len(launch.decodes) > 1  # type: ignore[attr-defined]
    arrival = first_event(GOLDEN, parse("deadline_ns > 0 and prompt_tokens > 1")).event
    assert arrival is not None
    assert arrival.scheduling.deadline_ns > 0  # type: ignore[attr-defined]


def test_where_it_holds_nowhere(events: list[Event]) -> None:
    found = first_event(GOLDEN, parse("request == 999_999"))
    assert (found.event, found.num_events) == (None, len(events))


def test_unknown_names_are_pointed_at() -> None:
    with pytest.raises(ExpressionError, match=r"column 1 of .*did you mean event"):
        first_event(GOLDEN, parse("evnt == 'preempt'"))
    with pytest.raises(ExpressionError, match=r"column 10 of .*no event preempted; did you mean preempt\?"):
        first_event(GOLDEN, parse("event == 'preempted'"))
    with pytest.raises(ExpressionError, match="no function req"):
        first_event(GOLDEN, parse("req(17).skips > 2"))


def test_another_environment_may_know_more(events: list[Event]) -> None:
    """As one that applies the events and knows the state."""
    seen: list[Event] = []

    def environment_of(event: Event) -> Environment:
        seen.append(event)
        return EventEnvironment(event)

    found = first_event(GOLDEN, parse("s == 12"), environment_of=environment_of)
    assert found.event == events[12]
    assert seen == events[:13]
