"""`eventlm trace diff`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.cli.main import main
from tests.replay.golden import FOLDER
from tests.replay.traces import record, small_machine

GOLDEN = str(FOLDER / "edf_tight.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    a = record(folder, small_machine({"type": "fcfs"}), num_requests=30, run="a")
    b = record(folder, small_machine({"type": "edf"}), num_requests=30, run="b")
    return str(a.parent), str(b.parent)


def test_two_that_are_the_same_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", GOLDEN, GOLDEN]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[-1].startswith("the runs are the same: all decisions are alike")
    assert "first difference" not in output
    assert main(["trace", "diff", GOLDEN, GOLDEN, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True
    assert found["first"] is None


def test_two_that_differ(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *runs, "--top", "3"]) == 10
    parts = capsys.readouterr().out.strip().split("\n\n")
    heads, setup, pairs, first, sequences, largest = parts
    assert heads.startswith("A  ")
    assert setup.splitlines()[1].split() == ["policy", "fcfs", "edf"] or "policy " in setup
    assert "0 only in A, 0 only in B" in pairs
    assert first.startswith("first difference: on replica 0 ")
    assert '\n  A: {"t":"' in first
    assert [row.split()[0] for row in sequences.splitlines()[1::3]] == [
        "TTFT,",
        "TPOT,",
        "end",
        "queueing,",
        "preemptions",
        "cached",
        "output",
    ]
    assert sequences.splitlines()[0].split()[-2:] == ["less", "more"]
    assert len(largest.splitlines()) == 4
    assert largest.splitlines()[1].startswith("#")


def test_of_the_first_decisions_that_differ_is_shown_what_differs_or_all(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "diff", *runs, "--json"]) == 10
    first = json.loads(capsys.readouterr().out)["first"]
    for flags, part in (([], "excerpt"), (["--whole"], "decision")):
        assert main(["trace", "diff", *runs, *flags]) == 10
        output = capsys.readouterr().out
        for side in "ab":
            text = json.dumps(first[side][part], separators=(",", ":"))
            assert f"\n  {side.upper()}: {text if flags else text[:400]}" in output


def test_json_has_every_sequence(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *runs, "--json"]) == 10
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False
    assert found["first"]["a"]["decision"]["t"] == "launch"
    for sequence in found["sequences"]:
        assert sequence["delta"]["e2e_ns"] == sequence["b"]["e2e_ns"] - sequence["a"]["e2e_ns"]
    e2e = next(metric for metric in found["metrics"] if metric["metric"] == "e2e")
    assert e2e["delta"]["count"] == len(found["sequences"])
    deltas = [sequence["delta"]["e2e_ns"] for sequence in found["sequences"]]
    assert e2e["num_less"] == sum(delta < 0 for delta in deltas)
    assert e2e["num_more"] == sum(delta > 0 for delta in deltas) > 0


def test_by_another_metric(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *runs, "--by", "ttft", "--top", "2"]) == 10
    table = capsys.readouterr().out.strip().split("\n\n")[-1].splitlines()
    assert "TTFT, ms: A" in table[0]
    assert len(table) == 3


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", GOLDEN]) == 2
    assert "the following arguments are required: B" in capsys.readouterr().err
    assert main(["trace", "diff", GOLDEN, str(tmp_path / "none")]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
    assert main(["trace", "diff", GOLDEN, GOLDEN, "--top", "-1"]) == 2
    assert main(["trace", "diff", GOLDEN, GOLDEN, "--by", "ttf"]) == 2
    assert "did you mean ttft?" in capsys.readouterr().err
