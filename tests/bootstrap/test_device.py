"""Whether the model runs on the processor or on GPUs, and which options are for what."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from eventlm.bootstrap import device
from eventlm.bootstrap.device import choose_device, devices_of_run, missing_software
from eventlm.bootstrap.gpus import ELSEWHERE
from eventlm.config import Config
from eventlm.config.load import load_config
from eventlm.errors import UsageError
from tests.bootstrap.fake_nvml import H100, gpu, install
from tests.bus.traces import header


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, with all that a worker needs."""
    install(monkeypatch, gpu(), gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "")


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tests of kernels have in place of a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def config_with(**options: Any) -> Config:
    return load_config(None, {"model": "/nowhere"} | options, environment={})


def refusal(**options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        choose_device(config_with(**options))
    return str(caught.value)


@pytest.mark.usefixtures("h100")
def test_gpus_are_taken_where_all_is_there() -> None:
    for wish in ("auto", "cuda"):
        gpus, warnings = choose_device(config_with(device=wish))
        assert ([each.device.name for each in gpus], warnings) == (["cuda:0", "cuda:1"], [])


@pytest.mark.usefixtures("h100")
def test_ranks_on_gpus_are_a_preview() -> None:
    gpus, [warning] = choose_device(config_with(pipeline_parallel_size=2))
    assert len(gpus) == 2
    assert warning.startswith("ranks on GPUs are a preview: ")
    assert "--kv-parallel-size 2: KV groups are for processors so far" in refusal(kv_parallel_size=2)
    assert "--torch-compile is for replicas of one worker" in refusal(torch_compile=True, tensor_parallel_size=2)
    assert "--ranks-per-gpu is for GPUs, and the model" in refusal(device="cpu", ranks_per_gpu=2)


def test_an_engine_whose_workers_are_elsewhere_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, no_driver="Driver Not Loaded")
    wish = {"launcher": "tests.engine.test_setup:Elsewhere", "kv_cache_dtype": "fp8"}
    assert choose_device(config_with(device="cuda", **wish)) == ([ELSEWHERE], [])
    assert choose_device(config_with(**wish)) == ([], [])


@pytest.mark.usefixtures("h100")
def test_a_gpu_here_is_none_of_workers_elsewhere() -> None:
    assert choose_device(config_with(launcher="tests.engine.test_setup:Elsewhere"))[0] == [ELSEWHERE]


@pytest.mark.usefixtures("h100")
def test_the_processor_is_taken_where_that_is_asked_for_and_for_the_fake_model() -> None:
    assert choose_device(config_with(device="cpu")) == ([], [])
    assert choose_device(config_with(model="fake")) == ([], [])


def test_without_a_gpu_the_processor_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, no_driver="Driver Not Loaded")
    assert choose_device(config_with()) == ([], [])
    message = refusal(device="cuda")
    assert message.startswith("--device cuda: there is no NVIDIA driver that answers (Driver Not Loaded); install it")
    assert message.endswith("; or give --device cpu")


def test_a_gpu_that_cannot_be_used_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "triton is not installed")
    gpus, [warning] = choose_device(config_with())
    assert gpus == []
    assert warning == f"the model runs on the processor, and not on the {H100} that is here: triton is not installed"
    assert refusal(device="cuda") == "--device cuda: triton is not installed; or give --device cpu"
    assert choose_device(config_with(device="cpu")) == ([], [])


def test_gpus_that_are_too_old_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing_software", lambda: "")
    install(monkeypatch, gpu("Tesla V100", capability=(7, 0)), gpu())
    assert [each.device.name for each in choose_device(config_with())[0]] == ["cuda:1"]
    install(monkeypatch, gpu("Tesla V100", capability=(7, 0)), gpu("GTX 1080", capability=(6, 1)))
    assert refusal(device="cuda").startswith("--device cuda: Tesla V100 has compute capability 7.0, and 8.0 (Ampere)")
    assert "not on the Tesla V100 that is here" in choose_device(config_with())[1][0]


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": 2}, "--threads is for processors, and the model runs on a GPU (NVIDIA H100 80GB HBM3); leave it"),
        ({"pin_threads": True}, "--pin-threads is for processors"),
        ({"cpu_kernels": "torch"}, "--cpu-kernels is for processors"),
        ({"quantization": "int8"}, "--quantization int8 is for processors"),
        ({"quantization": "int4"}, "--quantization int4 is for processors"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is for processors"),
        ({"max_num_seqs": 16_385}, "--max-num-seqs 16385: the model runs on a GPU (NVIDIA H100 80GB HBM3), which"),
        ({"max_num_seqs": 6000, "micro_batches": 3}, "--max-num-seqs 6000 in each of 3 micro-batches: the model runs"),
    ],
)
def test_what_is_for_processors_is_refused_on_a_gpu(options: dict[str, Any], said: str) -> None:
    assert said in refusal(**options)
    assert choose_device(config_with(device="cpu", **options)) == ([], [])


def test_fp8_and_two_ways_to_choose_kernels_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing_software", lambda: "")
    install(monkeypatch, gpu("NVIDIA A100", capability=(8, 0)))
    wanted = "--kv-cache-dtype fp8 needs compute capability 8.9 (Ada), and NVIDIA A100 has 8.0"
    assert refusal(kv_cache_dtype="fp8") == wanted
    assert "not with --batch-invariant" in refusal(torch_compile=True, batch_invariant=True)


@pytest.mark.usefixtures("h100")
def test_an_attention_backend_that_is_not_there_is_found_before_a_start() -> None:
    wanted = (
        "--attention-backend tritn: there is none of that name; did you mean triton? There are: auto, triton, flash"
    )
    assert refusal(attention_backend="tritn").startswith(wanted)


def test_the_interpreter_of_triton_takes_the_place_of_a_gpu_if_both_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, no_driver="Driver Not Loaded")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [each.name for each in choose_device(config_with(device="cuda"))[0]] == ["Triton's interpreter"]
    assert choose_device(config_with())[0] == []


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "triton"},
        {"gpu_memory_utilization": "0.8"},
        {"cuda_graphs": False},
        {"batch_invariant": True},
        {"torch_compile": True},
    ],
)
def test_what_is_for_gpus_is_refused_on_the_processor(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    [name] = options
    flag = ("--no-" if options[name] is False else "--") + name.replace("_", "-")
    install(monkeypatch, no_driver="Driver Not Loaded")
    said = f"{flag} is for GPUs, and the model runs on the processor; leave it out"
    assert refusal(**options).startswith(f"{said} (there is no NVIDIA")
    assert refusal(device="cpu", **options) == f"{said} (--device cpu says so)"


def test_a_run_of_gpus_needs_what_the_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = header(host={"device": "cuda:1", "gpu": "NVIDIA A10"})
    install(monkeypatch, gpu())
    monkeypatch.setattr(device, "missing_software", lambda: "")
    assert [each.name for each in devices_of_run(run)] == ["cuda:0"]
    monkeypatch.setattr(device, "missing_software", lambda: "no triton")
    with pytest.raises(UsageError, match=r"^the run was computed on a GPU \(NVIDIA A10\): no triton$"):
        devices_of_run(run)
    install(monkeypatch, no_driver="Driver Not Loaded")
    with pytest.raises(UsageError, match=r"^the run was computed on a GPU \(NVIDIA A10\): there is no NVIDIA driver"):
        devices_of_run(run)
    run = header(host={"device": "cuda:0", "gpu": "Triton's interpreter"})
    with pytest.raises(UsageError, match=r"\(Triton's interpreter\): set TRITON_INTERPRET=1$"):
        devices_of_run(run)
    assert devices_of_run(header(host={"device": "cpu"})) == []
    assert devices_of_run(header(host={})) == []


CPU_BUILD = "from typing import Optional\n\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n"
CUDA_BUILD = CPU_BUILD.replace("= None\nhip", "= '12.8'\nhip")


@pytest.mark.parametrize(
    ("version", "has_triton", "said"),
    [
        (CUDA_BUILD, True, ""),
        (CUDA_BUILD, False, "triton is not installed, in which the kernels are written; install it"),
        (CPU_BUILD, True, "the torch that is installed was built without CUDA; install one with it"),
        (None, True, "torch is not installed"),
    ],
)
def test_software_that_is_missing_is_named(
    version: str | None, has_triton: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version or "")
    there = {
        "torch": ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py")) if version else None,
        "triton": ModuleSpec("triton", None) if has_triton else None,
    }
    monkeypatch.setattr(importlib.util, "find_spec", there.__getitem__)
    problem = missing_software()
    assert problem.startswith(said)
    assert bool(problem) == bool(said)


def test_neither_torch_nor_triton_is_loaded_to_look_for_them() -> None:
    program = (
        "import sys\nfrom eventlm.bootstrap.device import missing_software\nmissing_software()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
