"""Writes `compiled.json` anew; compiles only the kernels that are not in it, or all of them with --all.

python -m tests.kernels.gpu.renew_table [--all]
"""

from __future__ import annotations

import os
import sys

from tests.kernels.gpu.compiled_table import COMPILE_ALL, PATH, Kernel, write_table
from tests.kernels.gpu.fake_driver import CAPABILITIES, launches
from tests.worker.gpu.compile_worker import WORKERS, worker_kernels


def main() -> None:
    """Launch everything and keep what was launched."""
    if "--all" in sys.argv:
        os.environ[COMPILE_ALL] = "1"
    kernels: dict[str, Kernel] = {}
    for capability in CAPABILITIES:
        for launch in launches(capability):
            kernels |= launch["kernels"]
    for write, capability, kv_cache_dtype in WORKERS:
        kernels |= worker_kernels(write, capability, kv_cache_dtype)
    write_table(kernels)
    print(f"{len(kernels)} kernels in {PATH}")


if __name__ == "__main__":
    main()
