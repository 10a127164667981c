"""Runs every kernel once with tiny shapes: `python -m benchmarks.gpu_sections.kernels_once`, for a checker of memory to
watch.
"""

from __future__ import annotations

import importlib

import torch

from benchmarks.gpu_sections.kernels import operations


def main() -> None:
    """All cases of all operations."""
    num_cases = 0
    for name in operations():
        for case in importlib.import_module(f"benchmarks.kernels.{name}").cases(torch.device("cuda"), smoke=True):
            if case.prepare is not None:
                case.prepare()
            case.run()
            num_cases += 1
    torch.cuda.synchronize()
    print(f"{num_cases} cases ran")


if __name__ == "__main__":
    main()
