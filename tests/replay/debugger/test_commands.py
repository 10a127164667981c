"""Every command, and what it says to mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import UsageError
from eventlm.replay.debugger.commands import COMMANDS, SHORT, SHOWN
from eventlm.replay.debugger.results import Result
from eventlm.replay.debugger.session import Session
from tests.replay.debugger.straight import events_of
from tests.replay.golden import FOLDER

EVENTS = events_of(FOLDER / "edf_tight.jsonl")
DRAINS = [event.s for event in EVENTS if getattr(event, "p", 0)]
STEPS = [event.s for event in EVENTS if type(event).__name__ == "StepCompleted"]
LAUNCHES = [event.s for event in EVENTS if type(event).__name__ == "Launched"]
PREEMPTED = [event.s for event in EVENTS if type(event).__name__ == "Preempted"]


def went(session: Session, *commands: str) -> int:
    for command in commands:
        session.execute(command)
    return session.position


def text_of(result: Result) -> str:
    return "\n".join(result.lines())


@pytest.mark.parametrize(("unit", "places"), [("drain", DRAINS), ("step", STEPS), ("launch", LAUNCHES)])
def test_moves_by_units(session: Session, unit: str, places: list[int]) -> None:
    assert went(session, f"next {unit}") == places[0]
    assert went(session, f"next 4 {unit}s") == places[4]
    assert went(session, f"back 2 {unit}") == places[2]
    assert went(session, "next", f"back {unit}") == places[2]
    assert went(session, f"back {unit}", "back", f"next {unit}") == places[1]


def test_moves_by_events(session: Session) -> None:
    assert went(session, "next") == 1
    assert went(session, "n 1_0", "next 5") == 16
    assert went(session, "back 3 events", "b") == 12


@pytest.mark.parametrize(
    ("start", "command", "problem"),
    [
        (196, "next", "event 196 is the last of the run"),
        (0, "back", "event 0 is the first of the run"),
        (190, "next 9", "only 6 events follow event 190"),
        (3, "back 9", "only 3 events precede event 3"),
        (196, "next drain", "no drain follows event 196"),
        (0, "back launch", "no launch precedes event 0"),
        (5, "next 900 steps", "only 44 steps follow event 5"),
        (5, "next 3 stps", "did you mean step"),
        (5, "next -1", "is no number of events"),
        (5, "next 0", "at least 1"),
        (5, "next " + "9" * 40, "only 191 events follow"),
    ],
)
def test_moves_that_cannot_be(session: Session, start: int, command: str, problem: str) -> None:
    session.move_to(start)
    with pytest.raises(UsageError, match=problem):
        session.execute(command)
    assert session.position == start


def test_find_and_what_is_not_found(session: Session) -> None:
    assert went(session, 'find event == "preempt"') == PREEMPTED[0]
    assert went(session, 'find event == "preempt"') == PREEMPTED[1]
    assert went(session, 'rfind event == "preempt"') == PREEMPTED[0]
    with pytest.raises(UsageError, match="nothing found: no event before 40, up to 0, has"):
        session.execute('rf event == "preempt"')
    with pytest.raises(UsageError, match="find needs an expression"):
        session.execute("find")
    assert session.position == PREEMPTED[0]


def test_breakpoints(session: Session) -> None:
    with pytest.raises(UsageError, match="there is no breakpoint to run to"):
        session.execute("cont")
    assert text_of(session.execute("break event == 'preempt'")).startswith("breakpoint 1: event == 'preempt'")
    session.execute("break running > 3")
    assert len(session.execute("break").to_object()["rows"]) == 2
    stops: list[int] = []
    with pytest.raises(UsageError, match="no breakpoint is reached after"):
        stops += iter(lambda: went(session, "cont"), None)
    session.execute("goto end")
    back: list[int] = []
    with pytest.raises(UsageError, match="no breakpoint is reached before"):
        back += iter(lambda: went(session, "rcont"), None)
    assert back[::-1] == stops
    assert set(PREEMPTED) < set(stops)
    session.execute("delete 1")
    assert set(session.breakpoints) == {2}
    with pytest.raises(UsageError, match="there is no breakpoint 1; there are: 2"):
        session.execute("delete 1")
    assert "1 breakpoint" in text_of(session.execute("delete"))


def test_there_are_not_too_many_breakpoints(session: Session) -> None:
    for _ in range(32):
        session.execute("break free < 2")
    with pytest.raises(UsageError, match="there are 32 breakpoints"):
        session.execute("break free < 2")


def test_two_breakpoints_at_one_event_are_both_said(session: Session) -> None:
    session.execute("break event == 'preempt'")
    session.execute("break by == 4")
    assert list(session.execute("cont").lines())[:2] == ["breakpoint 1: event == 'preempt'", "breakpoint 2: by == 4"]


def test_watches(session: Session) -> None:
    session.move_to(100)
    assert next(iter(session.execute("watch seq(92, 2).state").lines())) == "seq(92, 2).state: waiting -> decode"
    session.move_to(182)
    lines = list(session.execute("rwatch seq(92, 2).tokens").lines())
    before, after = lines[0].split(": ")[1].split(" -> ")
    assert int(after) == int(before) + 1
    assert session.core.state.requests[92].sequences[2].num_tokens == int(after)
    session.execute("back")
    assert session.core.state.requests[92].sequences[2].num_tokens == int(before)
    with pytest.raises(UsageError, match=r"policy does not change after event .*; it is edf"):
        session.execute("watch policy")
    with pytest.raises(UsageError, match="is about one event; use find"):
        session.execute("watch step")


@pytest.mark.parametrize("what", [name for name in SHOWN if name != "request"])
def test_show(session: Session, what: str) -> None:
    session.move_to(146)
    found = session.execute(f"show {what}")
    assert text_of(found)
    assert found.to_object()["kind"] in ("table", "report")
    with pytest.raises(UsageError):
        session.execute(f"show {what} nonsense more")


def test_show_request(session: Session) -> None:
    session.move_to(146)
    assert "rows in flight" in text_of(session.execute("show request 92.2"))
    assert "had ended" in text_of(session.execute("show request 4"))
    assert "had not arrived" in text_of(session.execute("show request 160"))
    with pytest.raises(UsageError, match="did you mean queue"):
        session.execute("show qeue")
    with pytest.raises(UsageError, match="There are: queue"):
        session.execute("show")


def test_diff(session: Session) -> None:
    session.move_to(110)
    here = session.execute("diff 91").to_object()
    assert here["rows"] == session.execute("diff 91 110").to_object()["rows"]
    assert ["request 103", "not there", "decode"] in here["rows"]
    assert session.position == 110
    for mistake in ("diff", "diff 1 2 3", "diff 999"):
        with pytest.raises(UsageError):
            session.execute(mistake)


def test_info(session: Session) -> None:
    session.execute("break free < 2")
    text = text_of(session.execute("info"))
    for part in ("events 0 to 196", "14 sequences, 44 steps, 62 drains, 7 marks", "breakpoint 1: free < 2"):
        assert part in text


def test_help_knows_every_command_and_name(session: Session) -> None:
    text = text_of(session.execute("help"))
    for name, command in COMMANDS.items():
        assert name in text
        own = text_of(session.execute(f"help {name}"))
        assert command.usage in own
    for short, name in SHORT.items():
        assert text_of(session.execute(f"h {short}")) == text_of(session.execute(f"help {name}"))
    names = text_of(session.execute("help expressions"))
    for name in ("oldest_wait", "preempt", "req(N)", "next_step"):
        assert name in names


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", "`help` lists commands"),
        ("nxt", "did you mean next"),
        ("help nxt", "did you mean next"),
        ("cont 5", "cont takes no argument"),
        ("why", "write why N"),
        ("why 999", "has no request 999"),
        ("story", "write story N"),
        ("story 92 wole", "write story N"),
        ("info x", "info takes nothing more"),
        ("delete ²", "'²' is not the number of a breakpoint"),
        ("delete " + "9" * 5000, "too large for a breakpoint"),
        ("show replica ²", "'²' is not the number of a replica"),
        ("show replica 1000000000", "there is no replica 1000000000"),
        ("diff x", "'x' is not the number of an event"),
    ],
)
def test_mistakes(session: Session, command: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        session.execute(command)
    assert "\n" not in str(error.value)


def test_an_unverified_run_answers_what_it_can(cache: None) -> None:
    with Session.open(FOLDER / "edf_tight.jsonl", verify=False) as session:
        for command in ("next drain", "goto 100", "find running > 2", "show marks", "show request 92", "show config"):
            session.execute(command)
        for command in ("show queue", "why 92", "show plan", "story 92", "branch", "diff 1 2", "watch policy"):
            with pytest.raises(UsageError, match="no states"):
                session.execute(command)


def test_results_are_plain_objects(session: Session) -> None:
    commands: list[str] = ["goto 146", "show queue", "why 92.2", "story 92.2", "show plan", "info", "help"]
    for command in commands:
        found: dict[str, Any] = session.execute(command).to_object()
        assert isinstance(found["kind"], str)


def test_a_folder_of_segments(random_runs: list[Path], cache: None) -> None:
    with Session.open(random_runs[0]) as session:
        assert went(session, "goto end", "back 3 drain", "next event") > 0
