"""Kernels that have been compiled for GPUs, in `compiled.json`: what identifies one, and the resources that it takes.

A kernel that a test launches and that is not in the table is compiled, and its test warns that the table is old. The
program `tests.kernels.gpu.renew_table` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import warnings
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


def run_launches(*command: str) -> list[dict[str, Any]]:
    """What a program that launches kernels printed of them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def warn_if_compiled(kernels: dict[str, Kernel]) -> None:
    """Say how the kernels that are not in the table come into it."""
    if new := sorted({kernel["kernel"] for key, kernel in kernels.items() if key not in read_table()}):
        warnings.warn(f"compiled anew: {', '.join(new)}; `make kernel-table` keeps them", stacklevel=2)
