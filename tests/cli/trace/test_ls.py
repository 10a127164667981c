"""`eventlm trace ls`: the table and the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.cli.main import main
from tests.bus.test_run_list import write_run
from tests.replay.golden import FOLDER
from tests.replay.replicaset_runs import made_sets


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    for name, golden in (("one", "edf_tight"), ("two", "fcfs_one_replica")):
        (folder / name).mkdir(parents=True)
        (folder / name / "trace.jsonl").write_bytes((FOLDER / f"{golden}.jsonl").read_bytes())
    write_run(folder, "three", 0, end=False)
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path))
    return folder


def test_the_state_folder_in_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ls"]) == 0
    columns, *rows = capsys.readouterr().out.splitlines()
    assert columns.split() == ["run", "model", "policy", "started", "(UTC)", "end", "seconds", "events", "MiB"]
    assert [row.split()[:3] for row in rows] == [
        ["one", "fake", "edf"],
        ["two", "fake", "fcfs"],
        ["three", "m", "fcfs"],
    ]
    assert "2025-01-01 00:00:00  killed" in rows[-1]
    assert main(["trace", "ls", str(runs), "--full"]) == 0
    columns, *rows = capsys.readouterr().out.splitlines()
    assert columns.split()[-2:] == ["requests", "finished"]
    assert int(rows[0].split()[-2]) == (FOLDER / "edf_tight.jsonl").read_text().count('"t":"arrive"')
    assert int(rows[0].split()[-1]) == (FOLDER / "edf_tight.jsonl").read_text().count('"t":"finish"')


def test_a_branch_has_its_own_policy(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = str(FOLDER / "edf_tight.jsonl")
    flags = ["--draws", "1", "-o", str(runs.parent / "branches")]
    assert main(["branch", golden, "--at", "101", *flags, "--policy", "fcfs"]) == 0
    assert main(["branch", golden, "--at", "101", *flags, "--set", "max_num_seqs=4"]) == 0
    capsys.readouterr()
    assert main(["trace", "ls", str(runs.parent / "branches"), "--json"]) == 0
    found = {run["run"]: run["policy"] for run in json.loads(capsys.readouterr().out)}
    assert {run.rpartition("-")[2]: policy.partition(":")[0] for run, policy in found.items()} == {
        "fcfs": "fcfs",
        "4": "edf",
    }


def test_all_models_and_policies_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_sets(tmp_path, num_requests=4)
    assert main(["trace", "ls", str(path.parent)]) == 0
    assert f"{path.name}  made, other  fcfs, edf" in capsys.readouterr().out
    assert main(["trace", "ls", str(path.parent), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["models"] == ["made", "other"]
    assert found["policy"].startswith("fcfs, edf:")


def test_json_has_paths_and_problems(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "two" / "trace.jsonl").write_text("nonsense\n")
    assert main(["trace", "ls", "--json"]) == 0
    found = {run["run"]: run for run in json.loads(capsys.readouterr().out)}
    assert found["one"]["policy"].startswith("edf:multiplier=1.5,min_deadline_ms=1")
    assert found["one"]["path"] == str(runs / "one")
    assert found["two"]["end"] == "unreadable"
    assert "is not a trace" in found["two"]["problem"]
    assert main(["trace", "ls"]) == 0
    assert "warning: 1 run cannot be read" in capsys.readouterr().err


def test_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path / "none"))
    assert main(["trace", "ls"]) == 0
    assert f"no run is recorded in {tmp_path}/none/runs" in capsys.readouterr().err
    assert main(["trace", "ls", str(tmp_path / "none")]) == 2
    assert "cannot list the runs of" in capsys.readouterr().err
