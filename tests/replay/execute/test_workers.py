"""Re-execution with real worker processes, and what can be wrong with them."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm._version import __version__
from eventlm.core.shards import Layout
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.setup import Device, describe_host
from eventlm.errors import EventLMError, UsageError
from eventlm.events import Header
from eventlm.launchers.launcher import StartedRank
from eventlm.replay.execute import workers as execution_workers
from eventlm.replay.execute.executable import check_executable
from eventlm.replay.execute.execution import ExecuteResult, execute
from eventlm.replay.execute.workers import WorkerProcesses, worker_setup
from eventlm.worker.protocol import FAKE_MODEL
from tests.processes import running_children
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


def test_a_trace_cannot_ask_for_any_number_of_processes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: 1 << 40)
    config = {"parallel": {"tensor_parallel_size": 64}}
    core = read_objects(run / "trace.jsonl")[0]["core"] | {"num_stages": 15}
    change_header(run, config=config, core=core | {"num_kv_groups": 2, "kv_shard_tokens": core["block_size"]})
    with pytest.raises(UsageError, match=r"64 tensor ranks, which are 1,920 ranks, and one has up to 1,024$"):
        execute_real(run)
    change_header(run, config=config, core=core)
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: 1 << 30)
    with pytest.raises(UsageError, match=r"^960 worker processes take at least 11,520 MiB"):
        execute_real(run)


def test_another_host_is_reported(run: Path) -> None:
    host = describe_host() | {"device": "none"}
    change_header(run, host=host, code_version=__version__)
    assert execute_real(run).host_differences == []
    change_header(run, host=host | {"python": "2.7", "threads": 64}, code_version="0.0.0")
    differences = execute_real(run).host_differences
    assert differences[0].startswith("eventlm: recorded 0.0.0, here ")
    assert differences[1].startswith("python: recorded 2.7, here 3.")
    assert differences[2] == "threads: recorded 64, here nothing"


def test_a_further_replicaset_is_compared_with_its_own_workers(run: Path) -> None:
    """What it does not say is the machine's, and not the first set's."""
    header = check_executable(run)
    record = structs.replace(header.sets[0], name="b", host={"dtype": "float32"})
    host = {"python": "2.7", "kernel_library": "1234", "dtype": "bfloat16"}
    header = structs.replace(header, host=host, replicaset="a", replicasets=[record])
    workers = WorkerProcesses([worker_setup(header, FAKE_MODEL, number=number) for number in (0, 1)], header)
    workers._hosts[1] = describe_host() | {"dtype": "float16"}
    found = [each for each in workers.host_differences() if "platform" not in each and "cpu" not in each]
    assert found[1].startswith("python: recorded 2.7, here 3.")
    assert "b: dtype: recorded float32, here float16" in found
    assert not any("kernel_library" in each for each in found)


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
    assert setup.decode_batches == 1
    change_header(run, core=msgspec.to_builtins(structs.replace(core, num_stages=2, micro_batches=3)))
    assert worker_setup(check_executable(run), "folder").decode_batches == 3


def test_kernels_are_those_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the option said: `auto` may be others here, and what is not here is told as a difference of the host."""
    monkeypatch.setattr(execution_workers, "available_builds", lambda: ["avx512", "avx2", "baseline"])
    for backend, impl, kernels in (
        ("cpu_avx2", "eventlm", "avx2"),
        ("cpu_baseline", "eventlm", "baseline"),
        ("cpu_amx", "eventlm", "auto"),
        ("torch_sdpa_gather", "eventlm", "torch"),
        ("transformers_avx2", "transformers", "avx2"),
        ("transformers_amx", "transformers", "auto"),
        ("transformers_torch", "transformers", "torch"),
    ):
        change_header(run, host={"attention_backend": backend})
        setup = worker_setup(check_executable(run), "folder")
        assert (setup.model_impl, setup.cpu_kernels) == (impl, kernels)


GPU_HOST = {"device": "cuda:0", "gpu": "NVIDIA H100", "attention_backend": "triton", "dtype": "bfloat16"}


def make_gpu_run(run: Path) -> Header:
    """The run, as if GPUs had computed it."""
    header = check_executable(run)
    core = msgspec.to_builtins(structs.replace(header.core, graph_buckets=[1, 2, 4]))
    gpu = {"batch_invariant": True, "torch_compile": True}
    change_header(run, host=GPU_HOST, core=core, config=header.config | {"gpu": gpu})
    return check_executable(run)


def test_workers_of_a_run_on_gpus_compute_as_those_did(run: Path) -> None:
    setup = worker_setup(check_executable(run), "folder")
    assert (setup.attention_backend, setup.batch_invariant, setup.graph_buckets) == ("auto", False, [])
    header = make_gpu_run(run)
    setup = worker_setup(header, "folder")
    assert (setup.attention_backend, setup.graph_buckets) == ("triton", [1, 2, 4])
    assert (setup.batch_invariant, setup.torch_compile, setup.cpu_kernels) == (True, True, "auto")
    assert setup.num_blocks == header.core.num_blocks
    with pytest.raises(UsageError, match="--threads 2 is for runs on CPUs"):
        worker_setup(header, "folder", threads=2)
    with pytest.raises(UsageError, match="a run on GPUs is computed again with the ranks that it had"):
        worker_setup(header, "folder", layout=Layout(1, 2))


def test_a_run_of_gpus_is_run_on_those_that_are_given(run: Path) -> None:
    """The fake worker, which needs none of them, runs such a trace all the same."""
    make_gpu_run(run)
    devices = [Device("cuda:1", "NVIDIA A10")]
    result = execute_real(run, make_workers=partial(WorkerProcesses, devices=devices))
    assert result.mismatches == []
    assert "gpu: recorded NVIDIA H100, here nothing" in result.host_differences
    assert "device: recorded cuda, here none" in result.host_differences


async def test_replicas_take_the_gpus_in_turn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = make_gpu_run(run)
    header = structs.replace(header, core=structs.replace(header.core, num_replicas=3))
    given: list[tuple[int, str, str]] = []
    start = WorkerProcess.start

    async def note(self: WorkerProcess, started: StartedRank) -> None:
        given.append((self.setup.replica, self.setup.device, self.setup.gpu))
        await start(self, started)

    monkeypatch.setattr(WorkerProcess, "start", note)
    devices = [Device("cuda:0", "NVIDIA A10"), Device("cuda:1", "NVIDIA H100")]
    workers = WorkerProcesses([worker_setup(header, FAKE_MODEL)], header, devices)
    for replica in range(3):
        await workers._start(replica, 1)
    await workers.close()
    assert given == [(0, "cuda:0", "NVIDIA A10"), (1, "cuda:1", "NVIDIA H100"), (2, "cuda:0", "NVIDIA A10")]


def test_a_run_on_a_gpu_needs_one(run: Path) -> None:
    make_gpu_run(run)
    with pytest.raises(UsageError, match=r"the run was computed on a GPU \(NVIDIA H100\), and there is none"):
        execute_real(run)


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
def test_a_worker_that_fails_is_reported(run: Path, fake: dict[str, int], message: str) -> None:
    change_header(run, config={"model": {"model": "fake", "fake": fake}})
    with pytest.raises(EventLMError, match=message):
        execute_real(run)
    assert running_children() == []


def test_the_wait_for_a_silent_worker_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(setup: Any, header: Header) -> WorkerProcesses:
        workers = WorkerProcesses(setup, header)
        workers._limits = [structs.replace(each, step_timeout_seconds=0) for each in workers._limits]
        return workers

    with pytest.raises(EventLMError, match=r"sent no valid message in 0 s in step \d"):
        execute_real(run, make_workers=impatient)
    assert running_children() == []
