"""Sessions from Python: opening, interrupting, and runs that cannot be opened."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from eventlm.errors import TraceCorruptError, TraceVersionError, UsageError
from eventlm.events.codec import chain, close_line
from eventlm.events.markers import BEHAVIOUR_VERSION
from eventlm.replay.debugger.interrupt import InterruptedCommandError
from eventlm.replay.debugger.session import Session
from tests.replay.golden import FOLDER

TRACE = FOLDER / "edf_tight.jsonl"


def test_the_example_of_the_module(cache: None) -> None:
    with Session.open(TRACE) as session:
        stop = session.execute("find free < 5 and running > 2")
        assert "\n".join(stop.lines()).startswith("found: free < 5 and running > 2")
        assert session.core.state.policy_name == "edf"


@pytest.mark.parametrize("command", ["find req(92).skips > 99", "find request == 999_999", "rfind req(4).skips > 99"])
def test_a_cancelled_command_keeps_the_position(
    session: Session, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    session.execute("goto 100")
    digests = session.core.digests()
    check = session.interrupt.check

    def cancelling() -> None:
        session.cancel()
        check()

    monkeypatch.setattr(session.interrupt, "check", cancelling)
    with pytest.raises(InterruptedCommandError, match="the position is what it was"):
        session.execute(command)
    monkeypatch.undo()
    assert session.position == 100
    assert session.core.digests() == digests
    session.execute("next")
    assert session.position == 101


def test_another_thread_may_cancel(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    check = session.interrupt.check
    has_begun = threading.Event()
    may_go_on = threading.Event()

    def waiting() -> None:
        has_begun.set()
        may_go_on.wait()
        check()

    def cancel() -> None:
        has_begun.wait()
        session.cancel()
        may_go_on.set()

    monkeypatch.setattr(session.interrupt, "check", waiting)
    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(InterruptedCommandError):
        session.execute("find req(4).skips > 99")
    thread.join()
    assert session.position == 0


def test_what_precedes_damage(tmp_path: Path, cache: None) -> None:
    lines = TRACE.read_bytes().split(b"\n")
    lines[120] = lines[120].replace(b'"ts":', b'"ts": ')
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TraceCorruptError, match="line 121"):
        Session.open(path)
    with Session.open(path, partial=True) as session:
        session.execute("goto end")
        assert session.position == 119
        assert "what precedes is shown" in session.index.facts.warnings[0]
        assert session.core.state.requests


def test_a_torn_trace_ends_where_it_is_whole(tmp_path: Path, cache: None) -> None:
    path = tmp_path / "torn.jsonl"
    content = TRACE.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with Session.open(path) as session:
        session.execute("goto end")
        assert "torn" in session.index.facts.warnings[0]


def test_another_version_and_nothing_at_all(tmp_path: Path) -> None:
    header = TRACE.read_bytes().split(b"\n")[0]
    body = header[: header.rindex(b',"h":"')].replace(b'"behaviour":%d' % BEHAVIOUR_VERSION, b'"behaviour":0')
    path = tmp_path / "old.jsonl"
    path.write_bytes(close_line(body, chain("", body)))
    with pytest.raises(TraceVersionError):
        Session.open(path)
    (tmp_path / "none.jsonl").write_bytes(b"")
    with pytest.raises(TraceCorruptError):
        Session.open(tmp_path / "none.jsonl")
    with pytest.raises(UsageError):
        Session.open(tmp_path / "missing.jsonl")
