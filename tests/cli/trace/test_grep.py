"""`eventlm trace grep`: what its flags ask for."""

from __future__ import annotations

import json

import pytest

from eventlm.cli.main import main
from tests.replay.golden import FOLDER

GOLDEN = FOLDER / "fcfs_one_replica.jsonl"


def grep(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[str]:
    assert main(["trace", "grep", str(GOLDEN), *arguments]) == code
    captured = capsys.readouterr()
    return captured.out.splitlines() if not code else [captured.err]


def test_lines_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    lines = GOLDEN.read_text().splitlines()
    assert grep(capsys) == lines
    assert grep(capsys, "--kind", "launch,done", "--kind", "arrive") == [
        line for line in lines if json.loads(line)["t"] in ("launch", "done", "arrive")
    ]
    events = [json.loads(line) for line in lines]
    middle = events[len(events) // 2]["ts"]
    window = grep(capsys, "--from", f"{middle}ns", "--to", f"{middle + 1}ns")
    assert window == [line for line, event in zip(lines, events, strict=True) if event["ts"] == middle]
    [first] = [event["s"] for event in events if event["t"] == "arrive"][:1]
    story = [json.loads(line) for line in grep(capsys, "--request", f"{first}.0")]
    assert (story[0]["t"], story[-1]["t"]) == ("arrive", "launch") or story[-1]["t"] in ("finish", "emit")
    assert all(json.loads(line)["c"] == first for line in grep(capsys, "--cause", str(first)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request", "x"], "--request x: not a request such as 17"),
        (["--request", "0"], "has no request 0: event 0 is `header`"),
        (["--kind", "lanch"], "no such kind of event; did you mean launch?"),
        (["--kind", ","], "--kind ',' names no kind of event; known: arrive, "),
        (["--from", "soon"], "--from soon: not a time"),
        (["--from", "2s", "--to", "1s"], "--to 1s is not after --from 2s"),
        (["--cause", "-1"], "not a number of at least 0"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    [error] = grep(capsys, *arguments, code=2)
    assert message in error


def test_an_end_that_was_not_read_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "grep", str(GOLDEN), "--from", "1ns", "--to", "2ns"]) == 0
    assert capsys.readouterr() == ("", "eventlm: warning: no line matches\n")


def test_a_query_that_matches_nothing_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "grep", str(GOLDEN), "--cause", "999999999"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "eventlm: warning: no line matches\n")
