"""What computes the model: the processor, or which GPUs. Found without loading torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from eventlm.bootstrap.gpus import ELSEWHERE, INTERPRETER, FoundGpus, Gpu, find_gpus, interpreted_gpu
from eventlm.config import Config
from eventlm.config.options import Option, did_you_mean, options
from eventlm.config.structs import AUTO
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import Device, num_ranks
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.replay.execute.executable import computed
from eventlm.replay.execute.workers import runs_on_gpu
from eventlm.worker.protocol import FAKE_MODEL, GPU_BACKEND_GROUP, GPU_BACKENDS

#: The oldest GPUs that the kernels are compiled for (Ampere).
LEAST_CAPABILITY = (8, 0)

#: The oldest GPUs that have fp8.
FP8_CAPABILITY = (8, 9)

#: Sequences at once on a GPU. A worker reserves memory there for each.
MAX_SEQS_ON_GPU = 16_384

#: Options that mean something on one kind of device only.
OF_PROCESSORS = ("threads", "pin_threads", "cpu_kernels")
OF_GPUS = (
    *("attention_backend", "gpu_memory_utilization", "cuda_graphs", "batch_invariant", "torch_compile"),
    "ranks_per_gpu",
)
_PREVIEW = (
    "ranks on GPUs are a preview: they give the right tokens, but are slow; docs/ranks.md says what they can do and "
    "how they were tested"
)
#: In the file that torch's build leaves: the version of CUDA that it was built for, or None.
_BUILT_FOR = re.compile(r"^cuda\b[^=]*= *'", re.M)


def choose_device(config: Config) -> tuple[list[Gpu], list[str]]:
    """The GPUs that `--device` asks for, which replicas take in turn, and warnings; none: the processor. Where a
    launcher finds places for workers, `ELSEWHERE` stands for the GPUs there.

    Raises UsageError where there is no such device, or an option is not for it.
    """
    wish = config.gpu.device
    if config.model.model == FAKE_MODEL:
        return [], []
    found = _wished(wish, is_local=resolve_launcher(config.parallel.launcher).is_local)
    if not found.problem:
        _check_for_gpu(config, found.gpus[0])
        return found.gpus, [_PREVIEW] if num_ranks(config) > 1 else []
    if wish == "cuda":
        raise UsageError(f"--device cuda: {found.problem}; or give --device cpu")
    for option in _given(config, OF_GPUS):
        flag = f"--no-{option.name.replace('_', '-')}" if option.default is True else option.flag
        raise UsageError(f"{flag} is for GPUs, and the model runs on the processor; leave it out ({found.problem})")
    warnings = [
        f"the model runs on the processor, and not on the {gpu.name} that is here: {found.problem}"
        for gpu in found.gpus[:1]
    ]
    return [], warnings


def _wished(wish: str, *, is_local: bool) -> FoundGpus:
    """The GPUs that there are for workers, on this host or elsewhere."""
    if wish == "cpu":
        return FoundGpus([], problem="--device cpu says so")
    interpreted = interpreted_gpu()
    if wish == "cuda" and interpreted is not None:
        return FoundGpus([interpreted])
    if wish == "cuda" and not is_local:
        return FoundGpus([ELSEWHERE])
    found = _usable_gpus()
    return found if is_local or found.problem else FoundGpus([ELSEWHERE])


def devices_of_run(header: Header) -> list[Device]:
    """The GPUs to re-execute a run on; none for a run that was computed on processors.

    Raises UsageError where such a run cannot be computed here.
    """
    on_gpus = [number for number in range(len(header.sets)) if runs_on_gpu(header, number)]
    if not on_gpus:
        return []
    interpreted = interpreted_gpu()
    found = FoundGpus([interpreted]) if interpreted is not None else _usable_gpus()
    if found.problem:
        gpu = computed(header, on_gpus[0]).host.gpu
        remedy = "set TRITON_INTERPRET=1" if gpu == INTERPRETER else found.problem
        raise UsageError(f"the run was computed on a GPU ({gpu}): {remedy}")
    return [gpu.device for gpu in found.gpus]


def _usable_gpus() -> FoundGpus:
    """The GPUs that can be used; with a problem, those that there are."""
    found = find_gpus()
    problem = found.problem or _too_old(found.gpus) or missing_software()
    if problem:
        return found._replace(problem=problem)
    return found._replace(gpus=[gpu for gpu in found.gpus if gpu.capability >= LEAST_CAPABILITY])


def _too_old(gpus: list[Gpu]) -> str:
    """Why all GPUs are too old; empty if one is not."""
    newest = max(gpus, key=lambda gpu: gpu.capability)
    if newest.capability >= LEAST_CAPABILITY:
        return ""
    have, need = (".".join(map(str, version)) for version in (newest.capability, LEAST_CAPABILITY))
    return f"{newest.name} has compute capability {have}, and {need} (Ampere) is the least that is needed"


def missing_software() -> str:
    """Which of the packages that compute on a GPU is missing, and what to do; empty if none is."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed; install one with CUDA (pip install torch)"
    version = Path(torch.origin).with_name("version.py")
    if not version.is_file() or not _BUILT_FOR.search(version.read_text()):
        return (
            "the torch that is installed was built without CUDA; install one with it (pip install --force-reinstall "
            "torch --index-url https://download.pytorch.org/whl/cu128)"
        )
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed, in which the kernels are written; install it (pip install 'triton>=3.6')"
    return ""


def _check_for_gpu(config: Config, gpu: Gpu) -> None:
    """Raise UsageError for an option that has no effect on a GPU, and for what only processors compute."""
    where = f"the model runs on a GPU ({gpu.name})"
    for option in _given(config, OF_PROCESSORS):
        raise UsageError(f"{option.flag} is for processors, and {where}; leave it out, or give --device cpu")
    if (groups := config.parallel.kv_parallel_size) > 1:
        raise UsageError(
            f"--kv-parallel-size {groups}: KV groups are for processors so far, and {where}; leave it out, or give "
            "--device cpu"
        )
    if config.gpu.torch_compile and num_ranks(config) > 1:
        raise UsageError("--torch-compile is for replicas of one worker each: not with several ranks; leave it out")
    if config.gpu.torch_compile and config.gpu.batch_invariant:
        raise UsageError(
            "--torch-compile chooses kernels whose results depend on the batch: not with --batch-invariant"
        )
    num_seqs, num_batches = config.scheduler.max_num_seqs, config.parallel.decode_batches
    if num_seqs * num_batches > MAX_SEQS_ON_GPU:
        batches = f" in each of {num_batches} micro-batches" if num_batches > 1 else ""
        raise UsageError(f"--max-num-seqs {num_seqs}{batches}: {where}, which takes at most {MAX_SEQS_ON_GPU:,}")
    _check_backend(config.gpu.attention_backend)
    if (how := config.model.quantization) != "none":
        raise UsageError(f"--quantization {how} is for processors, and {where}; leave it out, or give --device cpu")
    if config.cache.kv_cache_dtype == "int8":
        raise UsageError(
            f"--kv-cache-dtype int8 is for processors, and {where}; give fp8, which takes the same memory, or "
            "--device cpu"
        )
    if config.cache.kv_cache_dtype == "fp8" and gpu.capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (gpu.capability, FP8_CAPABILITY))
        raise UsageError(f"--kv-cache-dtype fp8 needs compute capability {need} (Ada), and {gpu.name} has {have}")


def _check_backend(name: str) -> None:
    """Check that there is an attention backend of this name; whether it can run the model is checked by the worker."""
    known = [AUTO, *GPU_BACKENDS, *sorted(point.name for point in entry_points(group=GPU_BACKEND_GROUP))]
    if name not in known:
        raise UsageError(
            f"--attention-backend {name}: there is none of that name{did_you_mean(name, known, listed_as='there are')}"
        )


def _given(config: Config, names: tuple[str, ...]) -> Iterator[Option]:
    """The options that differ from their defaults."""
    for option in map(options().__getitem__, names):
        if getattr(getattr(config, option.section), option.name) != option.default:
            yield option
