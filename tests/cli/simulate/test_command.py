"""`eventlm simulate` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.replay.verify.verifier import verify
from tests.cli.conftest import RunHere
from tests.replay.replicaset_runs import made_sets
from tests.replay.simulate.test_trace import record
from tests.replay.workload_files import write_made_workload

MODEL = "h200-llama3-8b"


@pytest.fixture
def workload(tmp_path: Path) -> str:
    return write_made_workload(tmp_path / "W.jsonl", prompt_tokens=300)


def test_the_report(run_here: RunHere, workload: str) -> None:
    code, output, errors = run_here("simulate", workload, "--cost-model", MODEL, "--slo", "ttft=1000,tpot=50")
    assert (code, errors) == (0, "")
    assert "requests         40: 40 sequences ran to the end" in output
    assert "policy fcfs" in output
    assert "goodput" in output
    assert "fluidity" in output
    lines = output.splitlines()
    assert any(line.startswith("TTFT ") for line in lines)
    assert any(line.startswith("257 to 1,024 ") for line in lines)


def test_backends(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    numbers = "backends:prefill_tokens_per_s=8000,token_ms=12,slots=4"
    flags = ("--cost-model", numbers, "--replicas", "2", "--router", "least_loaded", "--record", str(tmp_path / "sims"))
    code, output, errors = run_here("simulate", workload, *flags)
    assert (code, errors) == (0, "")
    assert "2 replicas" in output
    assert "sequences ran to the end" in output
    assert "steps" not in output
    run = tmp_path / "sims" / "latest"
    assert verify(run).exit_code == 0
    code, output, _ = run_here("replay", str(run), "--replicas", "4", "--set", "max_attempts=1")
    assert code == 0
    assert "answers of 2 backends" in output
    assert "attempts unlike any recorded" in output
    code, _, errors = run_here("replay", str(run), "--router", "pull", "--cost-model", MODEL)
    assert code == 2
    assert "its cost model must be one of backends" in errors


def test_several_replicasets(run_here: RunHere, workload: str) -> None:
    sets = ["--replicaset", f"big:cost_model={MODEL}", "--replicaset", "small:cost_model=a100-llama3-8b,replicas=2"]
    with open(workload) as file:
        lines = [json.loads(line) for line in file]
    for number, line in enumerate(lines[1:]):
        line |= {"model": "small"} if number % 4 == 0 else {}
    Path(workload).write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output, errors = run_here("simulate", workload, *sets, "--policy", "edf", "--slo", "ttft=1000,tpot=50")
    assert (code, errors) == (0, "")
    assert "cost model       big: h200-llama3-8b, small: a100-llama3-8b" in output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.startswith(("big ", "small "))}
    assert (rows["big"][1:3], rows["small"][1:3]) == (["big", "1"], ["small", "2"])
    assert (rows["big"][5], rows["small"][5]) == ("30", "10")
    code, output, _ = run_here("simulate", workload, *sets, "--json")
    found = json.loads(output)
    assert list(found["replicasets"]) == ["big", "small"]
    assert [each["num_complete"] for each in found["summary"]["replicasets"]] == [30, 10]
    assert list(found["simulated"]["cost_models"]) == ["big", "small"]


def test_each_replicaset_of_a_run_can_be_changed_and_all_keep_their_places(run_here: RunHere, tmp_path: Path) -> None:
    def replicas(*flags: str) -> list[tuple[str, int]]:
        code, output, errors = run_here("simulate", *flags, "--json")
        assert (code, errors) == (0, "")
        return [(name, each["core"]["num_replicas"]) for name, each in json.loads(output)["replicasets"].items()]

    run = str(made_sets(tmp_path / "made", num_requests=20))
    flags = ("--cost-model", run, "--replicaset")
    assert replicas(run, *flags, "main:replicas=3") == [("main", 3), ("small", 1)]
    assert replicas(run, *flags, "small:replicas=3") == [("main", 1), ("small", 3)]
    config = tmp_path / "serve.toml"
    config.write_text('model.model = "made"\nreplicasets.small.model = "other"\nreplicasets.new.model = "x"\n')
    found = replicas(run, "--config", str(config), *flags[:2], "--replicaset", "main:replicas=2",
                     "--replicaset", f"new:replicas=4,cost_model={MODEL}")  # fmt: skip
    assert found == [("main", 2), ("small", 1), ("new", 4)]
    # Of a workload file, and of a run without a main one.
    config.write_text('replicasets.a.model = "x"\nreplicasets.b.model = "y"\n')
    workload = write_made_workload(tmp_path / "W.jsonl", prompt_tokens=300)
    flags = ("--cost-model", MODEL, "--replicaset", "b:replicas=2")
    recorded = tmp_path / "recorded"
    assert replicas(workload, *flags, "--config", str(config), "--record", str(recorded)) == [("a", 1), ("b", 2)]
    assert replicas(str(recorded / "latest"), *flags) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --cost-model: what a step costs"),
        (
            ["--replicaset", f"a:cost_model={MODEL}", "--replicaset", "b:replicas=2"],
            "give --cost-model for the replicaset b, or it a cost_model of its own",
        ),
        (["--replicaset", "a"], "such as a:cost_model=h200-llama3-8b,replicas=2"),
        (["--replicaset", "a:repicas=2", "--cost-model", MODEL], "unknown key 'repicas'; did you mean replicas?"),
        (["--replicaset", "a:cost_model=nowhere"], "no cost model 'nowhere'"),
        (["--replicaset", "a:replicas=2", "--replicaset", "a:replicas=3"], "two replicasets are called a"),
    ],
)
def test_mistakes_in_replicasets_are_one_line(run_here: RunHere, workload: str, flags: list[str], message: str) -> None:
    code, output, errors = run_here("simulate", workload, *flags)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_a_model_that_no_replicaset_has_is_one_line(run_here: RunHere, workload: str) -> None:
    with open(workload, "a") as file:
        file.write('{"arrival_s":1000,"prompt_tokens":5,"output_tokens":5,"model":"smal"}\n')
    assert run_here("simulate", workload, "--cost-model", MODEL)[0] == 0
    code, _, errors = run_here("simulate", workload, "--cost-model", MODEL, "--replicaset", "small:replicas=2",
                               "--replicaset", "big:replicas=2")  # fmt: skip
    assert code == 2
    assert "request 40 is for the model 'smal', and the replicasets go by small, big" in errors
    assert errors.count("\n") == 1


def test_incidents_of_a_workload_happen(run_here: RunHere, workload: str) -> None:
    code, output, _ = run_here("simulate", workload, "--cost-model", MODEL, "--json")
    calm = json.loads(output)
    with open(workload, "a") as file:
        file.write('{"t":"pause","ts":100000000}\n{"t":"resume","ts":9100000000}\n{"t":"policy","ts":5,"name":"lrs"}\n')
    code, output, errors = run_here("simulate", workload, "--cost-model", MODEL, "--json")
    assert (code, output) == (2, "")
    assert "--extra-policy lrs" in errors
    code, output, _ = run_here("simulate", workload, "--cost-model", MODEL, "--extra-policy", "lrs", "--json")
    found = json.loads(output)
    assert code == 0
    assert found["plugins"]["policy"]["type"] == "fcfs"
    assert found["summary"]["duration_ns"] > calm["summary"]["duration_ns"] + 5_000_000_000


def test_json_has_what_was_simulated(run_here: RunHere, workload: str) -> None:
    flags = ("--policy", "edf:multiplier=2", "--batcher", "dynamic:target_ms=50", "--replicas", "2", "--num-blocks=999")
    code, output, _ = run_here("simulate", workload, "--cost-model", MODEL, *flags, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["core"]["num_replicas"] == 2
    assert found["core"]["num_blocks"] == 999
    assert found["plugins"]["policy"] == {
        "type": "edf", "multiplier": 2.0, "min_deadline_ms": 500.0, "evict_margin_ms": 10000.0
    }  # fmt: skip
    assert found["summary"]["num_complete"] == 40
    assert found["summary"]["latencies"]["ttft"]["p99"] > 0


def test_a_replica_can_be_split_into_ranks(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    flags = ("simulate", workload, "--cost-model", MODEL, "--json")
    alone = json.loads(run_here(*flags)[1])
    split_flags = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3", "--micro-batches", "4")
    code, output, errors = run_here(*flags, *split_flags, "--record", str(tmp_path / "sims"))
    assert (code, errors) == (0, "")
    split = json.loads(output)
    assert (split["core"]["num_stages"], split["core"]["micro_batches"]) == (3, 4)
    assert (split["simulated"]["cost_model"]["tensor"], split["simulated"]["cost_model"]["stages"]) == (2, 3)
    assert any("6 x NVIDIA H200" in note for note in split["notes"])
    assert split["summary"]["latencies"]["tpot"]["p50"] < alone["summary"]["latencies"]["tpot"]["p50"]
    assert verify(split["run_folder"]).divergence is None
    # In words.
    (engine,) = [line for line in run_here(*flags[:-1], *split_flags)[1].splitlines() if line.startswith("engine")]
    assert engine.endswith("; split into 3 stages of 2 tensor ranks")
    (engine,) = [line for line in run_here(*flags[:-1])[1].splitlines() if line.startswith("engine")]
    assert "split" not in engine


def test_a_recorded_simulation_verifies_and_is_a_workload(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    code, output, _ = run_here("simulate", workload, "--cost-model", MODEL, "--record", "sims", "--json")
    first = json.loads(output)
    assert code == 0
    assert verify(first["run_folder"]).exit_code == 0
    code, output, errors = run_here("simulate", "sims/latest", "--cost-model", MODEL, "--json")
    again = json.loads(output)
    assert (code, errors) == (0, "")
    assert again["core"] == first["core"]
    assert again["summary"]["num_steps"] == first["summary"]["num_steps"]
    # A clock that begins at 0 has no room for the worker's start before the first arrival.
    e2e = [found["summary"]["latencies"]["e2e"]["p99"] for found in (first, again)]
    assert e2e[0] == pytest.approx(e2e[1], abs=10)


def test_a_cost_model_can_be_fitted_to_a_trace(run_here: RunHere, tmp_path: Path) -> None:
    folder = record(tmp_path / "runs", 2).run_folder
    code, output, _ = run_here("simulate", folder, "--cost-model", folder, "--policy", "lrs", "--json")
    assert code == 0
    assert json.loads(output)["core"]["num_blocks"] == 64


def test_pictures(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    code, _, errors = run_here("simulate", workload, "--cost-model", MODEL, "--plot", "pictures")
    assert code == 0
    assert "pictures/ttft_cdf.png" in errors
    assert (tmp_path / "pictures" / "batch_size.png").stat().st_size > 1000


def test_closed_loop_and_speed_up(run_here: RunHere, workload: str) -> None:
    def e2e(*flags: str) -> int:
        code, output, _ = run_here("simulate", workload, "--cost-model", MODEL, "--json", *flags)
        assert code == 0
        return int(json.loads(output)["summary"]["latencies"]["e2e"]["p50"])

    assert e2e("--closed-loop", "1") <= e2e("--speed-up-arrivals", "0.1") < e2e("--speed-up-arrivals", "50")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["W.jsonl", "--cost-model", "h200-llama3-8"], "did you mean h200-llama3-8b?"),
        (["W.jsonl", "--cost-model", "none.toml"], "cannot read"),
        (["W.jsonl"], "--cost-model"),
        (["none.jsonl", "--cost-model", MODEL], "cannot read the"),
        (["empty.jsonl", "--cost-model", MODEL], "no request in this workload"),
        (["foreign.csv", "--cost-model", MODEL], "trace import"),
        (["W.jsonl", "--cost-model", MODEL, "--replicas", "0"], "--replicas '0': must be an integer from 1 to 1024"),
        (["W.jsonl", "--cost-model", MODEL, "--policy", "edff"], "did you mean edf?"),
        (["W.jsonl", "--cost-model", MODEL, "--num-blocks", "1"], "at least 2"),
        (["W.jsonl", "--cost-model", MODEL, "--speed-up-arrivals", "0"], "a factor above 0"),
        (["W.jsonl", "--cost-model", MODEL, "--speed-up-arrivals", "fast"], "a factor above 0"),
        (["W.jsonl", "--cost-model", MODEL, "--closed-loop", "-1"], "not a number of at least 0"),
        (["W.jsonl", "--cost-model", MODEL, "--slo", "ttft=-5"], "above 0"),
        (["W.jsonl", "--cost-model", MODEL, "--record", "W.jsonl"], "choose another folder"),
    ],
)  # fmt: skip
def test_mistakes(run_here: RunHere, tmp_path: Path, arguments: list[str], message: str) -> None:
    write_made_workload(tmp_path / "W.jsonl", num_requests=3)
    (tmp_path / "empty.jsonl").write_text('{"t":"workload","format":1}\n')
    (tmp_path / "foreign.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    code, output, errors = run_here("simulate", *arguments)
    assert code == 2 or "choose another folder" in errors
    assert output == ""
    assert message in errors
    assert errors.count("\n") == 1


def test_a_simulation_loads_neither_torch_nor_pictures(workload: str, tmp_path: Path) -> None:
    script = (
        "import sys; from eventlm.cli.main import main; "
        f"code = main(['simulate', {workload!r}, '--cost-model', '{MODEL}']); "
        "print(code, [name for name in ('torch', 'transformers', 'matplotlib', 'aiohttp', 'asyncio') "
        "if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "0 []\n"
