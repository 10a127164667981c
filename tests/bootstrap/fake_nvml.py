"""NVIDIA's management library with the GPUs that a test wants."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
#: Handle of a part of the last GPU.
PART = -1


class NVMLError(Exception):
    """Of the library."""


class FakeNvml(ModuleType):
    """A `pynvml` module: `gpus` are (name, total bytes, free bytes, capability); `error` is raised by what is asked."""

    NVMLError = NVMLError

    def __init__(self, gpus: list[tuple[str, int, int, tuple[int, int]]], *, no_driver: str = "", error: str = ""):
        super().__init__("pynvml")
        self._gpus = gpus
        self._no_driver = no_driver
        self._error = error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self._no_driver:
            raise NVMLError(self._no_driver)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc-{handle}" if handle != PART else "MIG-abc"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        """The GPUs of a test have no parts but their last."""
        if uuid != self.nvmlDeviceGetUUID(PART):
            raise NVMLError("Not Found")
        return PART

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        return len(self._gpus) + handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._gpus[handle][0]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self._error:
            raise NVMLError(self._error)
        return SimpleNamespace(total=self._gpus[handle][1], free=self._gpus[handle][2])

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        if handle == PART:
            raise NVMLError("Not Supported")
        return list(self._gpus[handle][3])


def install(
    patch: pytest.MonkeyPatch, *gpus: tuple[str, int, int, tuple[int, int]], no_driver: str = "", error: str = ""
) -> FakeNvml:
    """Have `import pynvml` find it, and all of its GPUs visible."""
    nvml = FakeNvml(list(gpus), no_driver=no_driver, error=error)
    patch.setitem(sys.modules, "pynvml", nvml)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


def gpu(
    name: str = H100, total: int = 80 * GIB, free: int = 79 * GIB, capability: tuple[int, int] = (9, 0)
) -> tuple[str, int, int, tuple[int, int]]:
    """One for `install`."""
    return name, total, free, capability
