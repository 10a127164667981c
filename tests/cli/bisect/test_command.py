"""`eventlm bisect` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.errors import ExitCode
from tests.cli.conftest import RunHere
from tests.replay.golden import FOLDER
from tests.replay.traces import tampered

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


def test_gauges_and_states(run_here: RunHere) -> None:
    code, output, errors = run_here("bisect", GOLDEN, "--when", "free < 5 and running > 3")
    assert (code, errors) == (0, "")
    first, second = output.splitlines()
    at = json.loads(run_here("debug", GOLDEN, "-c", "find free < 5 and running > 3", "--json")[1])["result"]["s"]
    assert first.startswith(f"event {at:,}, ")
    assert json.loads(second)["s"] == at
    code, output, _ = run_here("bisect", GOLDEN, "--when", "req(4).tokens > 10_000", "--json")
    assert (code, json.loads(output)["event"]) == (ExitCode.DIFFERENT, None)


def test_local_plugins_are_loaded_only_if_they_are_trusted(run_here: RunHere, tmp_path: Path) -> None:
    def rename(objects: list[dict[str, object]]) -> None:
        objects[0]["plugins"][0]["name"] = "eventlm.policies.edf:Edf"  # type: ignore[index]

    trace = tampered(Path(GOLDEN), tmp_path / "local.jsonl", rename)
    code, output, errors = run_here("bisect", str(trace), "--when", "free < 5")
    assert (code, output) == (2, "")
    assert "column 1 of 'free < 5': free is not known" in errors
    assert "--trust-local-plugins" in errors
    # Its name is another one than that of the policy that was recorded, so there is a divergence once it runs.
    trusted = ("bisect", str(trace), "--trust-local-plugins", "--when")
    code, output, errors = run_here(*trusted, "free < 5")
    assert (code, output, "--no-verify" in errors) == (ExitCode.DIFFERENT, "", True)
    assert run_here(*trusted, "running > 0", "--no-verify")[0] == 0
    assert run_here("bisect", str(trace), "--when", "event == 'preempt'")[0] == 0


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
    for condition in ("running > 10_000", "request > 10_000"):
        code, _, errors = run_here("bisect", str(torn), "--when", condition)
        assert (code, "torn" in errors) == (ExitCode.DIFFERENT, True)
        assert run_here("bisect", str(torn), "--when", condition, "--strict")[0] == ExitCode.TORN


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
        ((GOLDEN, "--when", "free < 5 and runing > 3"), "column 14 of 'free < 5 and runing > 3': there is no name"),
        ((GOLDEN, "--when", "running"), "column 1 of 'running': a number is neither true nor false"),
        ((GOLDEN, "--when", "req(4).skps > 2"), "column 8 of 'req(4).skps > 2': there is no attribute skps"),
        ((GOLDEN, "--when", "s == 3", *PREEMPTS), "leave --keep out"),
        ((GOLDEN, "--when", "s == 3", "--policy", "lrs", "--budget", "3"), "leave --budget and --policy out"),
        ((GOLDEN, "--when", "event == 'preempted'"), "did you mean preempt?"),
        ((GOLDEN, OTHER, "--when", "s == 3"), "take one trace"),
        ((GOLDEN, "--no-verify", *PREEMPTS), "--no-verify belongs to --when"),
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
