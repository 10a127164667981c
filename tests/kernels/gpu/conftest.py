"""Where the kernels of the tests run, and what Triton's interpreter must round like a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
}
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU, where kernels are interpreted."""
    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


@pytest.fixture(scope="session", autouse=True)
def _round_to_nearest() -> Iterator[None]:
    """The interpreter cuts bfloat16 off and loses carries in fp8, where a GPU rounds to the nearest, ties to even."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", _convert_float)
        yield


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: object) -> np.ndarray:
    """Bits of `values`, which are numbers of the Triton type `source`, as numbers of `target`."""
    numbers = torch.from_numpy(np.array(values, ndmin=1)).view(_DTYPES[source.name])
    if target.name == "fp8e4nv":
        numbers = numbers.to(torch.float32).clamp(-448, 448)
    converted = numbers.to(_DTYPES[target.name])
    bits: np.ndarray = converted.view(_INTEGERS[converted.itemsize]).numpy()
    return bits.reshape(values.shape)
