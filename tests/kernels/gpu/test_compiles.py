"""Each launch of `tests.kernels.gpu.compiled` compiles for the GPUs of today, within what they have, without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from tests.kernels.gpu.compiled_table import Kernel, read_table

#: Compiling takes a minute where nothing else is done, and many where much is.
pytestmark = pytest.mark.timeout(1500)

#: Compute capabilities of A100 and of H100 and H200.
CAPABILITIES = (80, 90)


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


def launches(capability: int) -> list[dict[str, Any]]:
    """All launches, with their errors and kernels."""
    return run_launches("tests.kernels.gpu.fake_driver", str(capability))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_everything_compiles(capability: int) -> None:
    launched = launches(capability)
    assert launched
    assert not [launch for launch in launched if launch["error"]]
    # A launch that reaches no kernel would say nothing.
    assert not [launch["launch"] for launch in launched if not launch["kernels"]]
    # One for each dtype, or requests would wait for another.
    assert [len(launch["kernels"]) for launch in launched if launch["launch"].startswith("penalties: ")] == [1, 1]
    kernels: dict[str, Kernel] = {key: kernel for launch in launched for key, kernel in launch["kernels"].items()}
    assert not [kernel for kernel in kernels.values() if kernel["spilled"] > 64]
    warn_if_compiled(kernels)
