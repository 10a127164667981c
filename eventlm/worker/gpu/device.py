"""The GPU of a worker, what goes wrong on one, and what a trace says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from eventlm.errors import EventLMError

#: Triton's interpreter runs kernels on the CPU, to check them; then that is the device.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


class GpuError(EventLMError):
    """The GPU, its driver or its compiler cannot do what is asked."""


def open_device(name: str) -> torch.device:
    """The device of this name, ready to be used. Raises GpuError if there is none."""
    if IS_INTERPRETED:
        return torch.device("cpu")
    device = torch.device(name)
    try:
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GpuError(
            f"the GPU {name} cannot be used: {first} (torch {torch.__version__}, built for CUDA {torch.version.cuda}); "
            "look at nvidia-smi, or compute on the CPU with --device cpu"
        ) from error
    return device


def describe_device(device: torch.device) -> dict[str, Any]:
    """What a trace's header says of it."""
    told: dict[str, Any] = {"triton": triton.__version__}
    if device.type != "cuda":
        return told | {"gpu": "Triton's interpreter"}
    properties = torch.cuda.get_device_properties(device)
    return told | {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_processors": properties.multi_processor_count,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


@contextlib.contextmanager
def clear_errors(device: torch.device) -> Iterator[None]:
    """Raise GpuError in place of what libraries raise if a GPU has too little memory, or a kernel does not compile."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise GpuError(
            f"the GPU's memory is full: {free >> 20:,} of {total >> 20:,} MiB are free, {_wanted(error)}; lower "
            "--gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs, or end other programs on it"
        ) from error
    except (triton.CompilationError, OutOfResources) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise GpuError(
            f"a kernel does not compile for this GPU ({torch.cuda.get_device_name(device)}, Triton "
            f"{triton.__version__}): {lines[-1] if lines else error!r}; try --attention-backend torch_sdpa, and please "
            "report it"
        ) from error


def _wanted(error: BaseException) -> str:
    """What torch says that it wanted."""
    text = str(error).splitlines()[0] if str(error) else ""
    _, found, rest = text.partition("Tried to allocate ")
    return f"{rest.split('. ')[0]} more are needed" if found else "more are needed"
