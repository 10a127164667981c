"""Questions at a position: why, the plan, the story, a branch."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.core.wait_reason import find_wait_reason
from eventlm.errors import UsageError
from eventlm.replay.debugger.interrupt import InterruptedCommandError
from eventlm.replay.debugger.session import Session
from eventlm.replay.explain.explainer import explain
from eventlm.replay.verify.verifier import verify
from tests.replay.golden import FOLDER


def test_why_agrees_with_the_index_about_the_head_of_the_line(session: Session) -> None:
    seen = set()
    for s in session.gauges.drains.tolist():
        head = session.gauges.values(["head_request", "head_index", "head_cause"], 0, s)
        if head["head_request"] is None:
            continue
        session.move_to(s)
        found = session.execute(f"why {head['head_request']}.{head['head_index']}").to_object()["report"]
        assert found["cause"] == head["head_cause"], s
        seen.add(found["cause"])
    assert len(seen) > 1


def test_why_says_what_came_next(session: Session) -> None:
    session.move_to(146)
    found = session.execute("why 92.2").to_object()
    assert found["report"]["cause"] == "draining"
    assert found["report"]["next_step"]["s"] == 152
    sequence = session.core.state.requests[92].sequences[2]
    reason = find_wait_reason(session.core.state, sequence, {})
    assert reason is not None
    assert reason.cause == "draining"
    with pytest.raises(UsageError, match="not live here"):
        session.execute("why 4")


@pytest.mark.parametrize("command", ["why 2", "show plan", "branch"])
def test_inside_a_drain_nothing_is_planned_yet(session: Session, command: str) -> None:
    session.move_to(2)
    with pytest.raises(UsageError, match=r"event 2 is inside a drain, .*: goto 4, its end"):
        session.execute(command)


def test_inside_a_drain_that_the_log_does_not_end(tmp_path: Path, cache: None) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_bytes(b"".join((FOLDER / "edf_tight.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    with Session.open(path) as session:
        session.move_to(2)
        with pytest.raises(UsageError, match=r"event 2 is inside a drain, .*: the log ends before it does"):
            session.execute("show plan")


@pytest.mark.parametrize("after", [1, 20])
def test_why_can_be_interrupted(session: Session, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    session.move_to(146)
    check, calls = session.interrupt.check, count(1)

    def interrupted() -> None:
        if next(calls) == after:
            session.cancel()
        check()

    monkeypatch.setattr(session.interrupt, "check", interrupted)
    with pytest.raises(InterruptedCommandError):
        session.execute("why 92.2")


def test_the_plan_of_a_drain(session: Session) -> None:
    session.move_to(146)
    assert "launched step 34" in "\n".join(session.execute("show plan").lines())
    assert session.position == 146


def test_stories(session: Session) -> None:
    session.move_to(146)
    so_far = session.execute("story 92.2").to_object()["report"]
    whole = session.execute("story 92.2 whole").to_object()["report"]
    [expected] = explain(FOLDER / "edf_tight.jsonl", [(92, 2)]).explanations
    assert (so_far["outcome"], whole["outcome"], whole["end_ns"]) == ("unfinished", "length", expected.end_ns)


def test_a_branch_from_here(session: Session, tmp_path: Path) -> None:
    session.move_to(103)
    text = "\n".join(session.execute(f"branch --policy fcfs --set max_num_batched_tokens=8 -o {tmp_path}").lines())
    assert text.startswith("branch after event ")
    [run] = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert verify(run).exit_code == 0
    with LogReader(run) as reader:
        assert reader.header.core.max_num_batched_tokens == 8
    with Session.open(run) as branched:
        branched.execute("find running > 1")
    assert session.position == 103


@pytest.mark.parametrize(
    ("start", "command", "problem"),
    [
        (3, "branch", "event 3 is inside a drain, .*: goto 4, its end"),
        (103, "branch --polcy edf", "branch has no --polcy; did you mean --policy"),
        (103, "branch --policy", "--policy needs a value"),
        (103, "branch --policy nobody", "nobody"),
        (103, 'branch --policy "edf', "no closing quotation"),
        (103, "branch --set num_blocks=5000", "num_blocks"),
        (196, "branch", "nothing left to do"),
    ],
)
def test_branches_that_cannot_be(session: Session, start: int, command: str, problem: str) -> None:
    session.move_to(start)
    with pytest.raises(UsageError, match=problem) as error:
        session.execute(command)
    assert "\n" not in str(error.value)
