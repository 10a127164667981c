"""A CUDA driver that runs nothing: launchers called under it compile their kernels for a GPU that is not there.

Triton brings its own assembler, so that all is found that a compiler can find, and how many registers, bytes of shared
memory and spills a kernel takes. Only in a process without TRITON_INTERPRET. As a program, it launches everything in
`tests.kernels.gpu.compiled` for the compute capability that is its argument and prints a JSON line for each kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

#: What a block can have of shared memory, by compute capability.
SHARED_BYTES = {80: 166_912, 90: 232_448}
#: What Triton says of fp8 (e4m3) before compute capability 8.9: such launches are left out there.
_NO_FP8 = "fp8e4nv not supported in this architecture"
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class FakeDriver(CudaDriver):  # type: ignore[misc]
    """Answers for one device; `launched` are the kernels in the order of their launches, each once."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.launched: dict[str, dict[str, Any]] = {}
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda device: self._properties())
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        """The GPU that is not there."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def _properties(self) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._capability], "multiprocessor_count": 132}

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        usage = resource_usage(binary)
        self.launched[f"{name} {len(self.launched)}"] = {"kernel": name, "shared": shared, **usage}
        return object(), 0, usage["registers"], usage["spilled"], 1024


def resource_usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, where what does not fit into registers goes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return {"registers": numbers["REG"], "spilled": numbers["STACK"]}


@contextlib.contextmanager
def fake_driver(capability: int) -> Iterator[FakeDriver]:
    """Triton's active driver is a fake one."""
    driver = FakeDriver(capability)
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        triton.runtime.driver._active = None


def main(capability: int, package: str = "tests.kernels.gpu.compiled") -> None:
    """Compile everything, going on where something does not compile."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for name, launch in importlib.import_module(f"{package}.{module.name}").launches():
            error = ""
            with fake_driver(capability) as driver:
                try:
                    launch()
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
                    cause = problem.__cause__ or problem.__context__
                    error += f" ({cause})" if cause else ""
            if _NO_FP8 in error and capability < 89:
                continue
            kernels = list(driver.launched.values())
            print(json.dumps({"launch": f"{module.name}: {name}", "error": error, "kernels": kernels}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
