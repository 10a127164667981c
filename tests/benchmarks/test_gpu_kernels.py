"""How the GPU benchmark judges a kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from benchmarks.gpu_harness.row import CEILINGS_FILE, Ceilings, Context
from benchmarks.gpu_sections.kernels import case_rows, relative_error
from benchmarks.kernels.case import KernelCase

RIGHT = torch.tensor([3.0, 4.0])


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Of a section behind the ceilings: 1 TB/s, 2 TFLOP/s."""
    ceilings = Ceilings(device="", bytes_per_second=1e12, flops_per_second=2e12, python_steps_per_second=1)
    (tmp_path / CEILINGS_FILE).write_bytes(msgspec.json.encode(ceilings))
    return Context(module="benchmarks.gpu_sections.kernels", smoke=True, folder=str(tmp_path), seconds=10)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (RIGHT, 0.0),
        (torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([3.0, float("nan")]), float("inf")),
        (torch.tensor([[3.0, 4.0]]), float("inf")),
    ],
)
def test_an_error_is_relative_and_nothing_that_is_no_number_passes(output: Tensor, error: float) -> None:
    assert relative_error(output, RIGHT) == pytest.approx(error)


def test_minus_infinity_where_it_should_be_is_right() -> None:
    masked = torch.tensor([3.0, float("-inf")])
    assert relative_error(masked, masked) == 0
    assert relative_error(masked, RIGHT) == float("inf")


@pytest.mark.parametrize(
    ("run", "outcomes"),
    [
        (lambda: RIGHT.clone(), ["missed", "met"]),
        (lambda: RIGHT + 1, ["failed"]),
        # What the memory held before.
        (lambda: torch.empty(2), ["failed"]),
    ],
)
def test_a_kernel_that_is_wrong_is_not_timed(context: Context, run: Callable[[], Tensor], outcomes: list[str]) -> None:
    case = KernelCase(
        name="kernel",
        run=run,
        reference=lambda: RIGHT,
        num_bytes=8,
        num_flops=1,
        target=0.9,
        peer=lambda: torch.randn(512, 512).mm(torch.randn(512, 512)),
        peer_name="torch",
        peer_target=1.0,
    )
    assert [row.outcome for row in case_rows(context, case)] == outcomes


def test_the_limit_is_the_one_that_takes_longer(context: Context) -> None:
    case = KernelCase(name="kernel", run=RIGHT.clone, reference=lambda: RIGHT, num_bytes=8, num_flops=15)
    assert [row.limit_name for row in case_rows(context, case)] == ["copy"]
    assert [row.limit_name for row in case_rows(context, case._replace(num_flops=17))] == ["product"]
