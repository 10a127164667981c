"""The GPU of a worker: points in its work, what goes wrong on it, and its description in a trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from eventlm.errors import EventLMError

#: Triton's interpreter runs kernels on the CPU, to check them; then that is the device.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
#: How the messages of torch and Triton begin if the error is one of CUDA.
_OF_THE_DRIVER = ("CUDA ", "Triton Error [CUDA]")


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
        raise GpuError(
            f"the GPU {name} cannot be used: {_lines(error)[0]} (torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}); look at nvidia-smi, or compute on the CPU with --device cpu"
        ) from error
    return device


def describe_device(device: torch.device) -> dict[str, Any]:
    """The device as the header of a trace describes it."""
    versions: dict[str, Any] = {"triton": triton.__version__}
    if device.type != "cuda":
        return versions | {"gpu": "Triton's interpreter"}
    properties = torch.cuda.get_device_properties(device)
    return versions | {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "gpu_processors": properties.multi_processor_count,
        "gpu_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
    }


@contextlib.contextmanager
def clear_errors(device: torch.device) -> Iterator[None]:
    """Raise GpuError in place of what libraries raise if a GPU fails, is full, or a kernel does not compile for it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuError(
            f"the GPU's memory is full: {_wanted(error)}{_free(device)}; lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs, or end other programs on it"
        ) from error
    except (triton.CompilationError, OutOfResources, PTXASError) as error:
        raise GpuError(
            f"a kernel does not compile for this GPU ({describe_device(device)['gpu']}, Triton {triton.__version__}): "
            f"{_lines(_origin(error))[-1]}; try --attention-backend torch_sdpa, and please report it"
        ) from error
    except RuntimeError as error:
        if not str(error).startswith(_OF_THE_DRIVER):
            raise
        # Nothing can be asked of the device after that, not even its name.
        raise GpuError(
            f"the GPU or its driver failed: {_lines(error)[0]}; if it fails again, look at `nvidia-smi -q` and at the "
            "driver's messages (`dmesg | grep -i xid`), and please report it if neither explains it"
        ) from error


class Mark:
    """A point in the device's work, after all that has been launched. A processor is past every mark at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: When it was set, on this machine's monotonic clock.
        self.set_ns = time.monotonic_ns()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def is_past(self) -> bool:
        """Whether the device is past it. Raises GpuError if something went wrong on the device before it."""
        with clear_errors(self._device):
            return self._event is None or self._event.query()

    def wait(self) -> None:
        """Until the device is past it. Raises as `is_past`."""
        if self._event is not None:
            with clear_errors(self._device):
                self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        """How long the device took from an earlier mark to this one; it must be past both."""
        if self._event is None or earlier._event is None:
            return self.set_ns - earlier.set_ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", and {free >> 20:,} of {total >> 20:,} MiB are free"


def _lines(error: BaseException) -> list[str]:
    """The lines of its message, at least one."""
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def _origin(error: BaseException) -> BaseException:
    """What was raised first: Triton raises an error anew for each function around the place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _wanted(error: BaseException) -> str:
    """How much memory torch could not get."""
    _, found, rest = _lines(error)[0].partition("Tried to allocate ")
    return f"{rest.split('. ')[0]} more are needed" if found else "more are needed"
