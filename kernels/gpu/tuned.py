"""Stored configurations of kernels (tile sizes, warps, stages), by GPU and shape: nothing is searched at start.

`tuned.toml` has a list for each operation. An entry has the name of a GPU, or "default" for any; what its shape must
be; and the configuration, with the keywords of the kernel's launch:

    [[grouped_gemm]]
    gpu = "NVIDIA H200"
    shape = { dtype = "bfloat16", max_rows = 64 }
    config = { BLOCK_M = 64, BLOCK_N = 128, BLOCK_K = 64, GROUP_M = 8, num_warps = 4, num_stages = 4 }

A key of `shape` asks for that very value, `max_NAME` for a NAME of at most that; what is not named may be anything.
Entries of the GPU at hand go before those of "default", then those that ask for more values, then those with more
bounds, then those with smaller ones.

The sizes of grids and tiles are computed here too, in plain Python: Triton's own functions take microseconds.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

DEFAULT = "default"
PATH = Path(__file__).with_name("tuned.toml")
_BOUND = "max_"

Shape = Mapping[str, int | str]


@functools.lru_cache(maxsize=16384)
def tuned(op: str, **shape: int | str) -> dict[str, int]:
    """The configuration of `op` for the GPU at hand that fits `shape` best; not to be changed.

    Raises LookupError where no entry fits; no operation should lack one of "default" without a shape.
    """
    fitting = [entry for entry in _entries().get(op, ()) if _fits(entry, shape)]
    if not fitting:
        raise LookupError(
            f'{PATH.name} has no configuration of {op} for {dict(shape)} on {gpu_name()!r}: add one of gpu = "default"'
        )
    config: dict[str, int] = max(fitting, key=_preference)["config"]
    return config


@functools.cache
def gpu_name() -> str:
    """Of the device at hand, as entries have it; "default" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else DEFAULT


@functools.cache
def _entries() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(PATH.read_text())


def _fits(entry: Mapping[str, Any], shape: Shape) -> bool:
    return entry["gpu"] in (DEFAULT, gpu_name()) and all(
        _allows(name, asked, shape) for name, asked in entry.get("shape", {}).items()
    )


def _allows(name: str, asked: int | str, shape: Shape) -> bool:
    bounded = shape.get(name.removeprefix(_BOUND)) if name.startswith(_BOUND) else None
    if isinstance(bounded, int) and isinstance(asked, int):
        return bounded <= asked
    return shape.get(name) == asked


def _preference(entry: Mapping[str, Any]) -> tuple[bool, int, int, list[int]]:
    shape = entry.get("shape", {})
    bounds = [-shape[name] for name in sorted(shape) if name.startswith(_BOUND)]
    return entry["gpu"] != DEFAULT, len(shape) - len(bounds), len(bounds), bounds


def ceil_div(number: int, divisor: int) -> int:
    """The quotient of two positive numbers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()
