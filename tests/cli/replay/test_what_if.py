"""`eventlm replay` with an alternative, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eventlm.cli.main import main
from tests.cli.conftest import RunHere
from tests.replay.replicaset_runs import made_sets
from tests.replay.traces import record, small_machine
from tests.replay.what_if_runs import requests_of, run_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(record(tmp_path_factory.mktemp("runs"), small_machine({"type": "fcfs"})))


def test_alternatives_stand_side_by_side(trace: str, run_here: RunHere) -> None:
    code, output, errors = run_here("replay", trace, "--policy", "edf", "--policy", "lrs", "--set", "blocks=20")
    assert (code, errors) == (0, "")
    assert "null test      passed: " in output
    heading = next(line for line in output.splitlines() if "baseline" in line)
    assert heading.split() == ["recorded", "baseline", "error", "bar", "edf", "lrs"]
    assert "edf            edf, num_blocks=20" in output
    assert all(len(line) <= 120 or trace in line for line in output.splitlines())


def test_repeated_flags_are_all_combined(trace: str, run_here: RunHere) -> None:
    flags = ["--policy", "edf", "--policy", "lrs", "--replicas", "1", "--replicas", "2", "--batcher", "dynamic"]
    code, output, _ = run_here("replay", trace, "--json", *flags, "--speed-up-arrivals", "1.5")
    found = json.loads(output)
    assert code == 0
    assert [each["name"] for each in found["alternatives"]] == [
        "edf, 1 replica",
        "edf, 2 replicas",
        "lrs, 1 replica",
        "lrs, 2 replicas",
    ]
    assert found["alternatives"][3]["description"] == "lrs, dynamic, 2 replicas, arrivals x 1.5"


def test_objectives_measure_attainment_and_fluidity(trace: str, run_here: RunHere) -> None:
    _, without, _ = run_here("replay", trace, "--json", "--closed-loop", "2")
    code, output, _ = run_here("replay", trace, "--json", "--closed-loop", "2", "--slo", "ttft=20,tpot=5")
    assert code == 0
    for name in ("slo_met", "fluidity_index"):
        before, found = json.loads(without)["metrics"][name], json.loads(output)["metrics"][name]
        assert before["recorded"] is None
        assert 0 < found["recorded"] <= 1_000_000
        assert 0 < found["alternatives"][0]["value"] <= 1_000_000


def test_a_cost_model_can_be_given(trace: str, tmp_path: Path, run_here: RunHere) -> None:
    (tmp_path / "slow.toml").write_text('type = "linear"\nbase_ps = 50_000_000_000\n')
    code, output, errors = run_here("replay", trace, "--json", "--policy", "edf", "--cost-model", "slow.toml")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["fit"] is None
    assert found["metrics"]["tpot_p50"]["baseline"] > 2 * found["metrics"]["tpot_p50"]["recorded"]
    assert run_here("replay", trace, "--policy", "edf", "--cost-model", "nothing.toml")[0] == 2


def test_traces_of_alternatives_are_traces(trace: str, tmp_path: Path, run_here: RunHere) -> None:
    code, output, _ = run_here("replay", trace, "--policy", "edf", "--output", "out")
    assert code == 0
    (run,) = [path for path in (tmp_path / "out").iterdir() if path.name != "latest"]
    assert f"Trace of edf: out/{run.name}" in output
    code, output, errors = run_here("replay", "out/latest")
    assert (code, errors) == (0, "")
    assert "decisions verified" in output
    assert run_here("trace", "stats", "out/latest")[0] == 0
    assert run_here("trace", "diff", trace, "out/latest")[0] in (0, 10)
    assert run_here("explain", "out/latest", "--slowest", "3")[0] == 0
    # A second run of the same name has a number.
    code, output, _ = run_here("replay", trace, "--policy", "edf", "--output", "out")
    assert code == 0
    assert f"Trace of edf: out/{run.name}-2" in output


def test_pictures_are_written(trace: str, tmp_path: Path, run_here: RunHere) -> None:
    code, _, errors = run_here("replay", trace, "--policy", "edf", "--replicas", "1", "--replicas", "3", "--plot", "p")
    assert code == 0
    names = ["ttft_cdf.png", "e2e_cdf.png", "quantiles.png"]
    assert errors.splitlines() == [f"p/{name}" for name in names]
    for name in names:
        assert (tmp_path / "p" / name).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    code, _, errors = run_here("replay", trace, "--policy", "edf", "--plot", "file")
    assert (code, "cannot write pictures to file" in errors) == (2, True)


def test_pictures_name_all_models(tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_sets(tmp_path)
    titles: list[str] = []
    monkeypatch.setattr(Figure, "suptitle", lambda _, title, **style: titles.append(title))
    code, _, _ = run_here("replay", str(path), "--policy", "lrs", "--plot", "p")
    assert (code, set(titles)) == (0, {f"what if: made, other, run {path.name}"})


MISTAKES = {
    ("--set", "blocks=0"): "--set: num_blocks=0: expected `int` >= 2",
    ("--set", "blocks=1"): "--set: num_blocks=1: expected `int` >= 2",
    ("--set", "blocks=1", "--set", "num_blocks=2"): "--set gives num_blocks twice",
    ("--set", "block_size=8"): "--set block_size: the trace's facts depend on the recorded 4",
    ("--set", "num_replicas=2"): "--set num_replicas: say --replicas instead",
    ("--set", "max_num_seqs=17"): "max_num_batched_tokens 16 is less than max_num_seqs 17",
    ("--set", "max_tokens_per_row=2"): "speculation cannot be simulated yet",
    ("--set", "bloks=4"): "unknown key 'bloks'",
    ("--set", "run_ahead_ns=100"): "unknown key 'run_ahead_ns'; did you mean run_ahead_ms?",
    ("--replicas", "0"): "0 replicas make no sense; an engine has 1 to 1024",
    ("--replicas", "1025"): "1025 replicas make no sense",
    ("--replicas", "many"): "invalid int value: 'many'",
    ("--speed-up-arrivals", "0"): "--speed-up-arrivals 0: a factor above 0",
    ("--speed-up-arrivals", "-1.5"): "--speed-up-arrivals -1.5: a factor above 0",
    ("--speed-up-arrivals", "fast"): "--speed-up-arrivals fast: a factor above 0",
    ("--speed-up-arrivals", "nan"): "--speed-up-arrivals nan: a factor above 0",
    ("--closed-loop", "0"): "--closed-loop: 0 is not a number of at least 1",
    ("--policy", "edff"): "did you mean edf?",
    ("--policy", "edf:multiplier=fast"): "multiplier",
    ("--batcher", "fcfs"): "fcfs is a policy, not a batcher",
    ("--policy", "edf", "--slo", "ttft=soon"): "ttft=soon is not a number of milliseconds",
    ("--slo", "ttft=500"): "--slo needs an alternative to what was recorded",
    ("--from", "1"): "--from needs an alternative to what was recorded",
    ("--policy", "edf", "--from", "9", "--to", "8"): "--to 8 is not after --from 9",
    ("--verify", "--to", "9"): "--to is for a what-if; it does not go with --verify",
    ("--verify", "--replicas", "2"): "--replicas is for a what-if; it does not go with --verify",
    ("--verify", "--policy", "edf", "--policy", "lrs"): "--verify takes one --policy, not 2",
    ("--execute", "--replicas", "2"): "--execute runs what was recorded as it was",
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.items(), ids=[" ".join(flags) for flags in MISTAKES])
def test_mistakes_are_one_line(trace: str, run_here: RunHere, flags: tuple[str, ...], message: str) -> None:
    code, output, errors = run_here("replay", trace, *flags)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_what_is_no_trace_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    (tmp_path / "foreign.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    code, _, errors = run_here("replay", "foreign.csv", "--policy", "edf")
    assert (code, errors.count("\n")) == (2, 1)
    code, _, errors = run_here("replay", "nothing.jsonl", "--policy", "edf")
    assert (code, errors.count("\n")) == (2, 1)


def test_a_torn_last_line_is_a_warning_or_with_strict_an_error(tmp_path: Path, run_here: RunHere) -> None:
    run = run_of(tmp_path, requests_of(range(0, 300, 10)))
    path = tmp_path / "torn.jsonl"
    path.write_bytes((run / "trace.jsonl").read_bytes()[:-30])
    code, _, errors = run_here("replay", str(path), "--policy", "edf")
    assert (code, "warning" in errors) == (0, True)
    assert run_here("replay", str(path), "--policy", "edf", "--strict")[0] == 4


def test_torch_is_not_loaded(trace: str) -> None:
    code = (
        "import sys; from eventlm.cli.main import main\n"
        f"assert main(['replay', {trace!r}, '--policy', 'edf']) == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)\n"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL)


def test_a_bare_replay_verifies(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace]) == 0
    assert "decisions verified, tokens not checked" in capsys.readouterr().out
