"""Moving and looking: positions, what a stop says, and runs that go on or lack something."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.events import Decision, Fact
from eventlm.replay.debugger import navigator as navigator_module
from eventlm.replay.debugger.results import Stop
from eventlm.replay.debugger.session import Session
from eventlm.system.system import real_system
from tests.replay.debugger.straight import StraightReplay, events_of
from tests.replay.golden import FOLDER
from tests.replay.index.test_live import append, bodies


def test_every_stop_says_which_event_its_state_follows(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(navigator_module, "_LOOK_BACK", 1)
    replay = StraightReplay(FOLDER / "edf_tight.jsonl")
    fact = 0
    for event, core in replay.walk():
        fact = fact if isinstance(event, Decision) else event.s
        stop = session.move_to(event.s)
        assert (stop.s, stop.ts, stop.state_s, session.position) == (event.s, event.ts, fact, event.s)
        assert stop.is_inside_drain == core.state.drain_open
        assert stop.replicas[0].running == len(core.state.replicas[0].running)
        assert (stop.s != stop.state_s) == any("the state is that after event" in line for line in stop.lines())


def test_what_a_log_alone_shows(cache: None) -> None:
    with Session.open(FOLDER / "edf_tight.jsonl", verify=False) as session:
        stop = session.move_to(100)
        assert stop.state_s == -1
        assert (stop.replicas[0].running, stop.replicas[0].held, stop.replicas[0].free) == (3, 10, -1)
        with pytest.raises(UsageError, match=r"the run was not verified .*there are no states"):
            session.core  # noqa: B018


def test_positions_that_lack_a_state_or_do_not_exist(lossy_runs: list[Path], cache: None) -> None:
    with Session.open(lossy_runs[0]) as session:
        (first, last), *_ = session.events.gaps
        with pytest.raises(UsageError, match=f"event {first:,} was not recorded: events {first:,} to {last:,}"):
            session.move_to(first)
        stop = session.move_to(last + 1)
        assert stop.state_s == -1
        assert "no state" in stop.note
        session.position = first - 1
        assert session.execute("next").to_object()["s"] == last + 1
        assert session.execute("back").to_object()["s"] == first - 1
    with Session.open(lossy_runs[1]) as session:
        assert session.position == session.events.first_s > 0
        assert "no state" in session.stop_at(session.position).note
        stop = session.execute("next")  # type: ignore[assignment]
        assert (stop.event, stop.state_s) == ("snapshot", session.position)


def test_a_run_that_is_being_written_is_followed(tmp_path: Path, cache: None) -> None:
    source = FOLDER / "edf_tight.jsonl"
    lines, events = bodies(source), events_of(source)
    preempted = [event.s for event in events if type(event).__name__ == "Preempted"]
    with LogWriter(real_system(), tmp_path, "run") as writer:
        append(writer, lines[:30])
        with Session.open(writer.run_folder) as session:
            session.execute("goto end")
            assert session.position == 29
            session.execute("break event == 'preempt'")
            append(writer, lines[30:40])
            session.execute("next 2")
            assert session.position == 31
            append(writer, lines[40:100])
            session.execute("cont")
            assert session.position == preempted[0]
            append(writer, lines[100:150])
            session.execute("find s > 120")
            assert session.position == 121
            append(writer, lines[150:])
            session.execute(f"goto {len(lines) - 1}")
            digests = StraightReplay(source).digests()
            assert session.core.digests() == digests[len(lines) - 1]
            session.execute("rcont")
            assert session.position == preempted[-1]


def test_a_run_that_is_read_on_is_searched_once(tmp_path: Path, cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FOLDER / "edf_tight.jsonl"
    lines = bodies(source)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        append(writer, lines[:140])
        with Session.open(writer.run_folder) as session:
            append(writer, lines[140:])
            checked = []
            monkeypatch.setattr(session.interrupt, "check", lambda: checked.append(1))
            with pytest.raises(UsageError, match=f"up to {len(lines) - 1}, has"):
                session.execute("find tokens > 1_000")
            assert len(lines) - 1 <= len(checked) < len(lines) + 10
            session.execute("find s >= 140")
            assert session.position == 140


def test_a_run_of_a_header_alone(tmp_path: Path, cache: None) -> None:
    path = tmp_path / "empty.jsonl"
    first = (FOLDER / "edf_tight.jsonl").read_bytes().split(b"\n")[0]
    path.write_bytes(first + b"\n")
    with Session.open(path) as session:
        assert session.stop_at(0).event == "header"
        for command in ("next", "back", "next drain", "back step", "find free < 2", "rfind s > 0"):
            with pytest.raises(UsageError):
                session.execute(command)
        session.execute("info")
        assert session.execute("show queue").to_object()["rows"] == []


def test_the_core_is_there_after_any_command(session: Session) -> None:
    stop = session.execute("find running > 2")
    assert isinstance(stop, Stop)
    assert len(session.core.state.replicas[0].running) > 2
    assert isinstance(events_of(FOLDER / "edf_tight.jsonl")[session.position], Fact)
