"""`eventlm shrink` as a user runs it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from eventlm.cli.parser import Parser
from eventlm.cli.shrink.command import configure
from eventlm.replay.workload.file import read_workload, save_workload
from tests.cli.conftest import RunHere
from tests.replay.golden import FOLDER
from tests.replay.shrink.planted import planted_workload

COST = """
type = "linear"
base_ps = 2000000000
prefill_ps = 20000000
decode_ps = 50000000
"""
ENGINE = ("--cost-model", "cost.toml", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")
SLOW = ("--keep", "max(ttft, prompt <= 256) > 400ms")


@pytest.fixture
def workload(tmp_path: Path) -> str:
    (tmp_path / "cost.toml").write_text(COST)
    save_workload(tmp_path / "W.jsonl", planted_workload(40))
    return "W.jsonl"


def test_a_workload_and_a_test_of_it(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    code, output, errors = run_here(
        "shrink", workload, *ENGINE, *SLOW, "-o", "small.jsonl", "--test", "test_small.py", "--jobs", "2"
    )
    assert (code, errors) == (0, "")
    assert "40 before, 4 now; no single one can go" in output
    assert "windows" in output
    small = read_workload(tmp_path / "small.jsonl")
    assert len(small.requests) == 4
    stub = runpy.run_path(str(tmp_path / "test_small.py"))
    with pytest.raises(AssertionError):
        stub["test_small"]()
    code, output, _ = run_here("shrink", "small.jsonl", *ENGINE, *SLOW, "-o", "again.jsonl", "--json", "--budget", "9")
    found = json.loads(output)
    assert code == 0
    assert (found["num_before"], found["num_requests"], found["num_trials"]) == (4, 4, 9)
    assert "9 simulations" in found["stopped"]


def test_a_trace_is_served_by_its_own_engine(run_here: RunHere, tmp_path: Path) -> None:
    trace = str(FOLDER / "edf_tight.jsonl")
    code, output, errors = run_here("shrink", trace, "--keep", "preemptions >= 1", "-o", "small.jsonl", "--json")
    assert (code, "drawn from the others" in errors) == (0, True)
    found = json.loads(output)
    assert found["options"]["policy"]["type"] == "edf"
    assert found["options"]["num_blocks"] == 10
    assert found["num_requests"] == 1
    assert (tmp_path / "small.jsonl").exists()


def test_limits_of_the_engine(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    # An engine of one token a step takes a step for each token, so there are few.
    save_workload(tmp_path / workload, planted_workload(20, long_tokens=600))
    flags = ("--keep", "count(prompt > 500) > 0", "--engine", "-o", "small.jsonl", "--json")
    code, output, _ = run_here("shrink", workload, *ENGINE, *flags)
    found = json.loads(output)
    assert (code, found["num_requests"]) == (0, 1)
    assert found["options"]["max_num_seqs"] == 1
    # 501 tokens of a prompt and one of output, and the block that is never given away.
    assert found["options"]["num_blocks"] == 1 + -(-502 // 16)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--keep", "max(ttft) > 10min", *ENGINE), "does not hold for the whole workload"),
        (("--keep", "max(ttft > 10min", *ENGINE), "column 17 of 'max(ttft > 10min': expected the )"),
        (("--keep", "max(ttft, promt < 3) > 1s", *ENGINE), "column 11 of .*did you mean prompt"),
        (SLOW, "a workload file, which has no durations: give --cost-model"),
        ((*SLOW, *ENGINE, "--budget", "soon"), "--budget soon: not a time"),
        ((*SLOW, *ENGINE, "--budget", "0"), "--budget 0"),
        ((*SLOW, *ENGINE, "--num-blocks", "1"), "at least 2"),
        ((*ENGINE,), "--keep"),
        ((*SLOW, *ENGINE, "--test", "none/test_small.py"), "--test none/test_small.py: its folder is not there"),
        ((*SLOW, *ENGINE, "--test", "."), "--test .: it is not a file"),
        ((*SLOW, *ENGINE, "--test", "./small.jsonl"), "--test ./small.jsonl: -o names the same file"),
        ((*SLOW, *ENGINE, "--test", "W.jsonl"), "--test W.jsonl would replace what is read"),
    ],
)
def test_mistakes_are_one_line(run_here: RunHere, workload: str, flags: tuple[str, ...], words: str) -> None:
    code, output, errors = run_here("shrink", workload, *flags, "-o", "small.jsonl")
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert words.split(".*")[0] in errors
    assert words.split(".*")[-1] in errors
    assert not Path("small.jsonl").exists()


def test_what_is_shrunk_is_not_replaced(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    before = (tmp_path / workload).read_bytes()
    code, _, errors = run_here("shrink", workload, *ENGINE, *SLOW, "-o", workload)
    assert (code, errors) == (
        2,
        "eventlm: error: -o W.jsonl would replace what is read from W.jsonl; choose another file\n",
    )
    assert (tmp_path / workload).read_bytes() == before


def test_the_help_explains_conditions() -> None:
    parser = Parser(prog="eventlm shrink")
    configure(parser)
    text = parser.format_help()
    assert "diverges(policy=edf, by=10ms)" in text
    assert "--budget" in text
