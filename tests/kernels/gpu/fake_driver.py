"""A CUDA driver that runs nothing: launchers called under it compile their kernels for a GPU that is not there.

Triton brings its own assembler, so this finds all that a compiler can find, and how many registers, bytes of shared
memory and spilled bytes a kernel takes. Only in a process without TRITON_INTERPRET. As a program, it launches all of
`tests.kernels.gpu.compiled` for the compute capability in its argument and prints a JSON line for each launch.

A kernel in `compiled.json` is not compiled again: `compiled_table` says what identifies one.
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
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITCallable

from tests.kernels.gpu.compiled_table import Kernel, kernel_key, read_table, run_launches

#: Compute capabilities of A100 and of H100 and H200.
CAPABILITIES = (80, 90)
#: Bytes of shared memory that a block can have, by compute capability.
SHARED_BYTES = {80: 166_912, 90: 232_448}
#: What Triton says of fp8 (e4m3) before compute capability 8.9: such launches are left out there.
_NO_FP8 = "fp8e4nv not supported in this architecture"
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class FakeDriver(CudaDriver):  # type: ignore[misc]
    """Answers for one device; `launched` are the kernels by key, in the order of their first launches."""

    def __init__(self, capability: int, known: dict[str, Kernel]) -> None:
        self._capability = capability
        self._known = known
        self.launched: dict[str, Kernel] = {}
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
        self._loaded = {"shared": shared, **usage}
        return object(), 0, usage["registers"], usage["spilled"], 1024

    def compile(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
        """The kernel, compiled unless its resources are known."""
        backend = make_backend(target)
        key = kernel_key(source, backend, backend.parse_options(options))
        if known := self._known.get(key):
            self.launched[key] = known
            return _KnownKernel()
        kernel = triton.compile(source, target=target, options=options)
        # Loads it, and refuses one that needs more shared memory than there is.
        kernel._init_handles()
        self.launched[key] = {"kernel": source.name, "capability": self._capability, **self._loaded}
        return kernel


class _KnownKernel:
    """Stands for a kernel that was compiled when the table was made."""

    function = packed_metadata = None

    def run(self, *arguments: object) -> None:
        """Launch nothing."""

    def launch_metadata(self, *arguments: object) -> None:
        """There is none."""


_FIRST_LINE = property(lambda kernel: 1, lambda kernel, number: None)


def _compile(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    return triton.runtime.driver.active.compile(source, target, options)


def resource_usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, where what does not fit into registers goes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return {"registers": numbers["REG"], "spilled": numbers["STACK"]}


@contextlib.contextmanager
def fake_driver(capability: int, known: dict[str, Kernel]) -> Iterator[FakeDriver]:
    """Triton's active driver is a fake one, which compiles no kernel that is in `known`."""
    driver = FakeDriver(capability, known)
    triton.runtime.driver.set_active(driver)
    try:
        with (
            # A kernel takes this function when it is first launched, and keeps it.
            mock.patch.object(triton.compiler, "compile", _compile),
            # A kernel is the same wherever in its file it is.
            mock.patch.object(JITCallable, "starting_line_number", _FIRST_LINE, create=True),
        ):
            yield driver
    finally:
        triton.runtime.driver._active = None


def launches(capability: int) -> list[dict[str, Any]]:
    """All launches, with their errors and kernels."""
    return run_launches("tests.kernels.gpu.fake_driver", str(capability))


def main(capability: int, package: str = "tests.kernels.gpu.compiled") -> None:
    """Compile everything, going on where something does not compile."""
    known = read_table()
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        for name, launch in importlib.import_module(f"{package}.{module.name}").launches():
            error = ""
            with fake_driver(capability, known) as driver:
                try:
                    launch()
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
                    cause = problem.__cause__ or problem.__context__
                    error += f" ({cause})" if cause else ""
            if _NO_FP8 in error and capability < 89:
                continue
            launched = {"launch": f"{module.name}: {name}", "error": error, "kernels": driver.launched}
            print(json.dumps(launched), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
