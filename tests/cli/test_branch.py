"""`eventlm branch`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunHere
from tests.replay.golden import FOLDER
from tests.replay.traces import read_objects
from tests.replay.what_if_runs import made_run

GOLDEN = str(FOLDER / "edf_tight.jsonl")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made_run(tmp_path_factory.mktemp("runs"), 5, num_requests=40, max_num_seqs=3, num_blocks=48))


def test_a_branch_is_compared_written_and_verified(trace: str, tmp_path: Path, run_here: RunHere) -> None:
    code, output, errors = run_here("branch", trace, "--at", "0.4s", "--policy", "lrs", "-o", "out")
    assert (code, errors) == (0, "")
    assert output.startswith("branch after event ")
    assert "null test      passed: " in output
    code, verified, _ = run_here("replay", str(tmp_path / "out" / "latest"))
    assert code == 0
    assert "earlier ones are not in it" in verified


def test_where_a_branch_cannot_be_written_it_is_said_at_once_and_a_second_one_is_numbered(
    trace: str, tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("branch", trace, "--at", "0.4s", "--draws", "1", "--policy", "lrs")
    for _ in range(2):
        assert run_here(*at, "-o", "out")[0] == 0
    runs = sorted(path.name for path in (tmp_path / "out").iterdir() if not path.is_symlink())
    assert len(runs) == 2
    assert runs[1] == f"{runs[0]}-2"
    assert (tmp_path / "out" / "latest").resolve().name == runs[1]
    assert run_here("replay", "out/latest")[0] == 0
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched:
        patched.setattr("eventlm.replay.branch.branch.read_run", None)
        code, _, errors = run_here(*at, "-o", "file")
    assert (code, errors) == (2, "eventlm: error: cannot record to file: File exists; choose another folder\n")


def test_as_json(trace: str, run_here: RunHere) -> None:
    flags = [
        "--draws",
        "1",
        "--batcher",
        "dynamic:target_ms=4",
        "--router",
        "least_loaded",
        "--set",
        "max_num_seqs=6",
        "--json",
    ]
    code, output, _ = run_here("branch", trace, "--at", "200", *flags, "--slo", "ttft=20,tpot=5")
    found = json.loads(output)
    assert code == 0
    assert found["branch"]["s"] >= 200
    assert found["num_draws"] == 1
    assert found["alternatives"][0]["description"] == "dynamic:target_ms=4, least_loaded, max_num_seqs=6"
    assert found["metrics"]["slo_met"]["recorded"] > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--at", "soon"], "--at soon: neither an event nor a time"),
        (["--at", "-5"], "--at"),
        (["--at", "99999"], "event 99999 is beyond the end"),
        (["--at", "900s"], "900 s is beyond the end"),
        (["--at", "100", "--draws", "6"], "--draws 6: 1 to 5 are possible"),
        (["--at", "100", "--policy", "edv"], "edv"),
        (["--at", "100", "--set", "blocks=9"], "--set num_blocks: the cache at event"),
        (["--at", "100", "--set", "block_size=8"], "--set block_size"),
        (["--at", "100", "--set", "max_num_seqs=4", "--set", "max_num_seqs=5"], "--set gives max_num_seqs twice"),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, flags: list[str], words: str) -> None:
    code, output, errors = run_here("branch", GOLDEN, *flags)
    assert (code, output) == (2, "")
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_inside_a_drain_the_next_place_is_named(run_here: RunHere) -> None:
    objects = read_objects(Path(GOLDEN))
    inside = next(item["s"] for item in objects if item["t"] == "arrive" and not item.get("p"))
    code, _, errors = run_here("branch", GOLDEN, "--at", str(inside))
    assert code == 2
    end = int(errors.split("ends with event ")[1].split(":")[0])
    assert run_here("branch", GOLDEN, "--at", str(end), "--policy", "fcfs")[0] == 0


def test_a_damaged_trace_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    content = bytearray(Path(GOLDEN).read_bytes())
    content[len(content) // 4] ^= 1
    (tmp_path / "damaged.jsonl").write_bytes(content)
    code, _, errors = run_here("branch", "damaged.jsonl", "--at", "300")
    assert code == 3
    assert "is damaged at line" in errors
