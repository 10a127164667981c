"""Re-execution with real worker processes, and what can be wrong with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from eventlm._version import __version__
from eventlm.control.setup import describe_host
from eventlm.errors import EventLMError, UsageError
from eventlm.events import Header
from eventlm.replay import execution_workers
from eventlm.replay.executable import check_executable
from eventlm.replay.execute import ExecuteResult, execute
from eventlm.replay.execution_workers import WorkerProcesses, worker_setup
from eventlm.worker.protocol import FAKE_MODEL
from tests.control.engines import running_children
from tests.replay.executions import record_with_tokens
from tests.replay.traces import CALM, read_objects, small_machine, tampered


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = small_machine({"type": "fcfs"}, num_replicas=2)
    return record_with_tokens(tmp_path_factory.mktemp("calm"), 1, machine=machine, chaos=CALM, num_requests=6)


@pytest.fixture
def run(calm: Path, tmp_path: Path) -> Path:
    """A copy to meddle with."""
    return Path(shutil.copytree(calm, tmp_path / "run"))


def change_header(run: Path, **changes: Any) -> None:
    tampered(run / "trace.jsonl", run / "trace.jsonl", lambda objects: objects[0].update(changes))


def execute_real(run: Path, **options: Any) -> ExecuteResult:
    result = execute(run, model=FAKE_MODEL, **options)
    assert running_children() == []
    return result


def test_each_replica_and_each_epoch_has_a_worker_of_its_own(tmp_path: Path) -> None:
    for seed in range(100):
        run = record_with_tokens(tmp_path, seed, num_requests=8)
        steps = [item for item in read_objects(run / "trace.jsonl") if item["t"] == "done"]
        if len({(item["replica"], item["epoch"]) for item in steps}) in (3, 4):
            break
    result = execute_real(run)
    assert (result.exit_code, result.mismatches) == (0, [])
    assert result.num_steps > 20


def test_another_host_is_told(run: Path) -> None:
    host = describe_host() | {"device": "none"}
    change_header(run, host=host, code_version=__version__)
    assert execute_real(run).host_differences == []
    change_header(run, host=host | {"python": "2.7", "threads": 64}, code_version="0.0.0")
    differences = execute_real(run).host_differences
    assert differences[0].startswith("eventlm: recorded 0.0.0, here ")
    assert differences[1].startswith("python: recorded 2.7, here 3.")
    assert differences[2] == "threads: recorded 64, here nothing"


def test_workers_are_those_of_the_run(run: Path) -> None:
    header = check_executable(run)
    setup = worker_setup(header, "folder")
    core = header.core
    assert (setup.block_size, setup.num_blocks) == (core.block_size, core.num_blocks)
    assert (setup.dtype, setup.threads, setup.fake) == ("auto", 0, {})
    change_header(run, host={"threads": 3, "dtype": "bfloat16"})
    setup = worker_setup(check_executable(run), "folder")
    assert (setup.dtype, setup.threads) == ("bfloat16", 3)
    assert worker_setup(header, "folder", threads=5).threads == 5
    assert setup.cpu_kernels == "auto"
    # Nobody needs to wait as long as the steps took.
    assert worker_setup(header, FAKE_MODEL).fake["base_ns"] == 0


def test_kernels_are_those_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the option said: `auto` may be others here, and what is not here is told as a difference of the host."""
    monkeypatch.setattr(execution_workers, "available_builds", lambda: ["avx512", "avx2", "baseline"])
    for backend, kernels in (
        ("cpu_avx2", "avx2"),
        ("cpu_baseline", "baseline"),
        ("cpu_amx", "auto"),
        ("torch_sdpa_gather", "torch"),
    ):
        change_header(run, host={"attention_backend": backend})
        assert worker_setup(check_executable(run), "folder").cpu_kernels == kernels


def test_another_model_is_refused(run: Path) -> None:
    change_header(run, model_fingerprint="0" * 32)
    with pytest.raises(UsageError, match=r"the model fake is not the one that ran: .*; give the folder of that model"):
        execute_real(run)


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"die_ppm": 1_000_000}, r"the worker died \(exit code 1\) in step 0 of replica \d \(event \d+\)"),
        ({"no_such": 1}, "the worker failed: TypeError: .* while it started"),
    ],
)
def test_a_worker_that_fails_is_told(run: Path, fake: dict[str, int], message: str) -> None:
    change_header(run, config={"model": {"model": "fake", "fake": fake}})
    with pytest.raises(EventLMError, match=message):
        execute_real(run)
    assert running_children() == []


def test_a_worker_that_says_nothing_is_not_waited_for_for_ever(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(setup: Any, header: Header) -> WorkerProcesses:
        workers = WorkerProcesses(setup, header)
        workers._step_seconds = 0
        return workers

    with pytest.raises(EventLMError, match="said nothing that can be read in 0 s in step 0"):
        execute_real(run, make_workers=impatient)
    assert running_children() == []
