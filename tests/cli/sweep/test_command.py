"""`eventlm sweep` as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.events import PolicySwapped
from eventlm.replay.sweep.cell import FinishedCell
from eventlm.system.system import real_system
from tests.cli.conftest import RunHere
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until
from tests.replay.traces import CALM, small_machine
from tests.replay.workload_files import write_made_workload
from tests.simulation import Simulation

MODEL = "a100-llama3-8b"


@pytest.fixture
def workload(tmp_path: Path) -> str:
    return write_made_workload(tmp_path / "W.jsonl", prompt_tokens=400)


def test_backends(run_here: RunHere, workload: str) -> None:
    numbers = "backends:prefill_tokens_per_s=4000,token_ms=10,slots=4"
    flags = ("--router", "pull", "--router", "round_robin", "--replicas", "1", "--replicas", "2", "--hedge-ms", "50")
    code, output, _ = run_here(
        "sweep", workload, "--cost-model", numbers, *flags, "--loads", "1", "--output", "out", "--jobs", "1", "--json"
    )
    assert code == 0
    found = json.loads(output)
    assert len(found["configurations"]) == 4
    for each in found["configurations"]:
        summary = each["loads"][0]["summary"]
        assert (summary["num_complete"], summary["num_steps"]) == (40, 0)


def test_several_replicasets(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    sets = ["--replicaset", f"big:cost_model={MODEL}", "--replicaset", "small:cost_model=h200-llama3-8b,policy=edf"]
    arguments = ("sweep", workload, *sets, "--output", "out", "--policy", "fcfs", "--policy", "lrs", "--loads", "1")
    code, output, _ = run_here(*arguments, "--json")
    assert code == 0
    found = json.loads(output)
    assert list(found["options"]["replicasets"]) == ["big", "small"]
    for each in found["configurations"]:
        assert [part["num_complete"] for part in each["loads"][0]["summary"]["replicasets"]] == [40, 0]
    cell = json.loads(next((tmp_path / "out" / "cells").glob("lrs-*.json")).read_text())
    assert list(cell["spec"]["costs"]) == ["big", "small"]
    assert json.loads(run_here(*arguments, "--json")[1])["num_run"] == 0


def test_table_files_and_picture(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    flags = ("--policy", "fcfs", "--policy", "lrs", "--loads", "1,4", "--slo", "p99_ttft=900,p90_tpot=500")
    arguments = ("sweep", workload, "--cost-model", MODEL, "--output", "out", *flags)
    code, output, errors = run_here(*arguments)
    assert code == 0
    assert errors.count("wrote") == 3
    lines = output.splitlines()
    assert lines[0] == "4 simulations"
    assert sum(line.startswith(("fcfs fixed", "lrs fixed")) for line in lines) == 6
    assert next(line for line in lines if line.startswith("configuration ")).split()[1:3] == ["load", "arriving/s"]
    assert "capacity at p99 TTFT <= 900 ms, p90 TPOT <= 500 ms" in output
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["load"]) for row in rows] == [("fcfs", "1"), ("fcfs", "4"), ("lrs", "1"), ("lrs", "4")]
    assert all(float(row["p99_ttft_ms"]) > 0 for row in rows)
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000
    code, output, _ = run_here(*arguments, "--json")
    found = json.loads(output)
    assert found == json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert (found["num_cells"], found["num_run"]) == (4, 0)
    assert found["slo"] == {"p99_ttft": 900.0, "p90_tpot": 500.0}


def test_numbers_of_ranks_are_combined_and_named(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    (tmp_path / "eventlm.toml").write_text("[parallel]\npipeline_parallel_size = 2\n")
    ranks = ("--tensor-parallel-size", "1", "--tensor-parallel-size", "2", "--config", "eventlm.toml")
    flags = ("--cost-model", MODEL, "--output", "out", "--loads", "1")
    code, output, errors = run_here("sweep", workload, *flags, *ranks)
    assert code == 0, errors
    names = [line.split("  ")[0] for line in output.splitlines() if line.startswith("fcfs")]
    assert names == ["fcfs fixed 2 stages", "fcfs fixed 2 stages of 2 tensor ranks"]
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["tensor_parallel_size"], row["pipeline_parallel_size"]) for row in rows] == [("1", "2"), ("2", "2")]
    assert float(rows[0]["p50_ttft_ms"]) > float(rows[1]["p50_ttft_ms"])
    # Another number is another simulation.
    code, output, _ = run_here("sweep", workload, *flags, *ranks, "--kv-parallel-size", "1", "--kv-parallel-size", "2")
    assert output.splitlines()[0] == "4 simulations, 2 of them from an earlier sweep"
    assert len(list((tmp_path / "out" / "cells").glob("fcfs-fixed-pull-r1-t2-s2-*"))) == 2


def test_a_configuration_file_counts(run_here: RunHere, workload: str, tmp_path: Path) -> None:
    (tmp_path / "eventlm.toml").write_text(
        '[scheduler]\npolicy = "edf:multiplier=2"\nmax_num_seqs = 4\n[cache]\nnum_blocks = 500\n'
    )
    flags = ("--config", "eventlm.toml", "--loads", "1", "--json", "--batcher", "dynamic:target_ms=50")
    code, output, _ = run_here("sweep", workload, "--cost-model", MODEL, "--output", "out", *flags)
    found = json.loads(output)
    assert code == 0
    assert found["options"] == {"max_num_seqs": 4, "num_blocks": 500}
    assert found["configurations"][0]["policy"] == {"type": "edf", "multiplier": 2}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loads", "1,zero"], "--loads zero: a factor above 0"),
        (["--loads", ","], "at least one is needed"),
        (["--slo", "ttft=2"], "such as p99_ttft=2000"),
        (["--replicas", "0"], "replicas"),
        (["--pipeline-parallel-size", "31"], "an integer from 1 to 15"),
        (["--jobs", "0"], "--jobs 0"),
        (["--refine", "2"], "which needs --slo"),
        (["--policy", "nobody"], "unknown policy 'nobody'"),
    ],
)
def test_mistakes(run_here: RunHere, workload: str, flags: list[str], message: str) -> None:
    code, output, errors = run_here("sweep", workload, "--cost-model", MODEL, "--output", "out", *flags)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_interrupted_sweep_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    workload = write_made_workload(tmp_path / "W.jsonl", num_requests=400, prompt_tokens=400)
    command = [sys.executable, "-m", "eventlm", "sweep", workload, "--cost-model", MODEL, "--output", "out"]
    command += ["--loads", ",".join(str(1 + index / 10) for index in range(2000)), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        cells = tmp_path / "out" / "cells"
        wait_until(lambda: list(cells.glob("[!.]*.json")))
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, errors
    assert (output, errors) == ("", "")
    wait_until(lambda: not any(map(is_running, workers)))
    finished = list(cells.iterdir())
    assert 0 < len(finished) < 2000
    import msgspec

    for file in finished:
        assert msgspec.json.decode(file.read_bytes(), type=FinishedCell).summary.num_complete == 400


def test_a_swap_of_the_recorded_policy_is_reported(run_here: RunHere, tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path / "runs", "run") as writer:
        simulation = Simulation(1, num_requests=10, machine=small_machine({"type": "fcfs"}), chaos=CALM, writer=writer)
        simulation.at(5_000_000, lambda: simulation.engine_core.put_fact(PolicySwapped(name="lrs")))
        simulation.run()
    flags = ("--cost-model", MODEL, "--output", "out", "--loads", "1", "--jobs", "1")
    code, _, errors = run_here("sweep", "runs/run", *flags)
    assert code == 0
    assert "note: the run's policy was swapped at run time (fcfs, lrs from 0.005 s on), which is not repeated" in errors
    code, output, _ = run_here("simulate", "runs/run", "--cost-model", MODEL)
    assert code == 0
    assert "swapped at run time (fcfs, lrs from 0.005 s on)" in output
