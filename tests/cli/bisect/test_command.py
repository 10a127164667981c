"""`eventlm bisect` as a user runs it."""

from __future__ import annotations

import json

import pytest

from eventlm.errors import ExitCode
from tests.cli.conftest import RunHere
from tests.replay.golden import FOLDER

GOLDEN = str(FOLDER / "edf_tight.jsonl")
OTHER = str(FOLDER / "fcfs_one_replica.jsonl")
PREEMPTS = ("--keep", "preemptions >= 1")


def test_the_first_event(run_here: RunHere) -> None:
    code, output, errors = run_here("bisect", GOLDEN, "--when", 'event == "preempt" and request == 4')
    assert (code, errors) == (0, "")
    first, second = output.splitlines()
    assert first.startswith("event 40, 0.0")
    assert json.loads(second)["t"] == "preempt"
    code, output, _ = run_here("bisect", GOLDEN, "--when", "request == 4 and event == 'preempt'", "--json")
    assert json.loads(output)["event"]["s"] == 40
    code, output, _ = run_here("bisect", GOLDEN, "--when", "request == 4 and event == 'reject'")
    assert code == ExitCode.DIFFERENT
    assert "holds at none of" in output


def test_a_threshold(run_here: RunHere) -> None:
    code, output, errors = run_here("bisect", GOLDEN, "--over", "blocks=10..60", *PREEMPTS, "--jobs", "1")
    assert (code, "drawn" in errors) == (0, True)
    first = output.splitlines()[0]
    assert first.startswith("preemptions >= 1 holds at num_blocks = ")
    assert "more than once" not in output
    code, output, _ = run_here("bisect", GOLDEN, "--over", "blocks=10..60", *PREEMPTS, "--json")
    found = json.loads(output)
    assert found["above"] == found["below"] + 1
    assert first.endswith(f"= {found['below']} and not at {found['above']}")
    code, output, _ = run_here("bisect", GOLDEN, "--over", "load=50%..4_000%", "--keep", "requests > 3")
    assert code == ExitCode.DIFFERENT
    assert "requests > 3 holds at any value of load" in output


def test_the_settings_of_two_runs(run_here: RunHere) -> None:
    code, output, _ = run_here("bisect", GOLDEN, OTHER, *PREEMPTS)
    assert code == 0
    assert "num_blocks" in output
    assert "10 (not with 24)" in output
    code, output, _ = run_here("bisect", GOLDEN, OTHER, *PREEMPTS, "--json")
    found = json.loads(output)
    assert found["holds_in_first"] is True
    assert len(found["deciding"]) < len(found["differing"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((GOLDEN,), "--keep PRED is missing"),
        ((GOLDEN, *PREEMPTS), "--over NAME=LOW..HIGH"),
        ((GOLDEN, "--when", "evnt == 'x'"), "column 1 of \"evnt == 'x'\": there is no name evnt; did you mean event?"),
        ((GOLDEN, "--when", "s == 3", *PREEMPTS), "leave --keep and --over out"),
        ((GOLDEN, OTHER, "--when", "s == 3"), "take one trace"),
        ((GOLDEN, "--over", "blocks", *PREEMPTS), "such as blocks=500..8000"),
        ((GOLDEN, "--over", "blocks=a..8", *PREEMPTS), "'a' is not a number"),
        ((GOLDEN, "--over", "blcks=5..8", *PREEMPTS), "--over blcks: not a number of an engine"),
        ((GOLDEN, "--over", "blocks=8..8", *PREEMPTS), "must be below"),
        ((GOLDEN, GOLDEN, *PREEMPTS), "the same settings"),
        ((GOLDEN, OTHER, "--num-blocks", "20", *PREEMPTS), "leave the engine's flags out"),
        ((GOLDEN, OTHER, "--keep", "requests > 0"), "of both runs"),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, arguments: tuple[str, ...], words: str) -> None:
    code, output, errors = run_here("bisect", *arguments)
    assert (code, output) == (2, "")
    assert words in errors.splitlines()[-1]
