"""`eventlm bisect` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert run_here("bisect", GOLDEN, "--over", "load=0.5..40", "--keep", "requests > 3")[1] == output


def test_the_limit_of_an_engine_is_no_threshold(run_here: RunHere) -> None:
    code, output, _ = run_here("bisect", GOLDEN, "--over", "seqs=8..24", "--keep", "requests > 0")
    assert code == ExitCode.DIFFERENT
    assert "requests > 0 holds at any value of max_num_seqs that was tried" in output
    assert "Above 16 it cannot be simulated: --max-num-batched-tokens 16 is less than --max-num-seqs 17" in output


def test_a_budget_that_is_spent(run_here: RunHere) -> None:
    over = ("bisect", GOLDEN, "--over", "blocks=10..60", *PREEMPTS, "--budget")
    code, output, errors = run_here(*over, "1")
    assert code == ExitCode.FAILED
    assert "The search ended early: the budget of 1 simulation is spent" in output
    code, output, errors = run_here(*over, "3")
    assert (code, "error" in errors) == (0, False)
    assert output.startswith("preemptions >= 1 holds at num_blocks = 10 and not at 16\nThe search ended early")
    code, output, _ = run_here("bisect", GOLDEN, OTHER, *PREEMPTS, "--budget", "2")
    assert (code, "Fewer may do: the budget of 2 simulations" in output) == (0, True)


def test_a_torn_trace(run_here: RunHere, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(Path(GOLDEN).read_bytes()[:20_000])
    over = ("bisect", str(torn), "--over", "load=50%..60%", "--keep", "requests > 1")
    code, _, errors = run_here(*over)
    assert (code, "eventlm: warning: " in errors, "torn" in errors) == (ExitCode.DIFFERENT, True, True)
    code, output, errors = run_here(*over, "--strict")
    assert (code, output) == (ExitCode.TORN, "")


def test_the_settings_of_two_runs(run_here: RunHere) -> None:
    code, output, _ = run_here("bisect", GOLDEN, OTHER, *PREEMPTS)
    assert code == 0
    assert "num_blocks  10 (not with 24)" in output
    assert "max_model_len" not in output
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
        ((GOLDEN, "--when", "s == 3", *PREEMPTS), "leave --keep out"),
        ((GOLDEN, "--when", "s == 3", "--policy", "lrs", "--budget", "3"), "leave --budget and --policy out"),
        ((GOLDEN, "--when", "event == 'preempted'"), "did you mean preempt?"),
        ((GOLDEN, OTHER, "--when", "s == 3"), "take one trace"),
        ((GOLDEN, "--over", "blocks", *PREEMPTS), "such as blocks=500..8000"),
        ((GOLDEN, "--over", "blocks=a..8", *PREEMPTS), "'a' is not a number"),
        ((GOLDEN, "--over", "blocks=10%..20%", *PREEMPTS), "'10%' is not a number"),
        ((GOLDEN, "--over", "load=0..2", *PREEMPTS), "'0' is no factor of the arrival rate, such as 0.5 or 50%"),
        ((GOLDEN, "--over", "load=1..3s", *PREEMPTS), "'3s' is no factor"),
        ((GOLDEN, "--over", "port=1..40", *PREEMPTS), "--over port: not a number of an engine"),
        ((GOLDEN, "--over", "blocks=5..8", "--keep", "preemptions"), "neither true nor false"),
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
