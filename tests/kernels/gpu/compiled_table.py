"""Kernels that have been compiled for GPUs, in `compiled.json`: what identifies one, and the resources that it takes.

A kernel that a test launches and that is not in the table is compiled, and its test warns that the table is old.

python -m tests.kernels.gpu.compiled_table: write the table anew; compile only what is not in it
python -m tests.kernels.gpu.compiled_table --all: the same, and compile everything
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TypedDict

import triton
from triton.compiler import ASTSource

PATH = Path(__file__).with_name("compiled.json")
#: Set in the environment: the table is not read, so that everything is compiled.
COMPILE_ALL = "EVENTLM_COMPILE_ALL_KERNELS"


class Kernel(TypedDict):
    """One for one compute capability: registers of a thread; bytes that it spills, and of shared memory."""

    kernel: str
    capability: int
    shared: int
    registers: int
    spilled: int


def kernel_key(source: ASTSource, backend: Any, options: Any) -> str:
    """Of all that its code depends on: the functions' text, signature, constants, options, assembler and Triton."""
    return hashlib.sha256(
        "\n".join([triton.__version__, source.hash(), backend.hash(), options.hash()]).encode()
    ).hexdigest()


def read_table() -> dict[str, Kernel]:
    """The kernels by key; none where everything is to be compiled."""
    if os.environ.get(COMPILE_ALL):
        return {}
    table: dict[str, Kernel] = json.loads(PATH.read_text())
    return table


def write_table(kernels: dict[str, Kernel]) -> None:
    """Write them in an order that shows well what has changed."""
    ordered = sorted(kernels.items(), key=lambda item: (item[1]["kernel"], item[1]["capability"], item[0]))
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(kernel)}" for key, kernel in ordered)
    PATH.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    """Launch everything and keep what was launched."""
    # They launch by way of this module.
    from tests.kernels.gpu.test_compiles import CAPABILITIES, launches
    from tests.worker.gpu.test_compiles import WORKERS, worker_kernels

    if "--all" in sys.argv:
        os.environ[COMPILE_ALL] = "1"
    kernels: dict[str, Kernel] = {}
    for capability in CAPABILITIES:
        for launch in launches(capability):
            kernels |= launch["kernels"]
    for model, capability, kv_cache_dtype in WORKERS:
        kernels |= worker_kernels(model, capability, kv_cache_dtype)
    write_table(kernels)
    print(f"{len(kernels)} kernels in {PATH}")


if __name__ == "__main__":
    main()
