"""Every kernel: whether it is right, and how near it comes to what the device gives and to what others wrote."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import benchmarks.kernels
from benchmarks.gpu_sections.row import Context, Part, Parts, Row, check, speed
from benchmarks.gpu_sections.timing import median_seconds
from benchmarks.kernels.case import KernelCase

#: Modules that hold no cases.
NOT_OPERATIONS = ("case", "tune")


def parts(context: Context) -> Parts:
    """A part an operation."""
    operations = [module.name for module in pkgutil.iter_modules(benchmarks.kernels.__path__)]
    measured: dict[str, Part] = {
        name: functools.partial(_measure, context, name) for name in operations if name not in NOT_OPERATIONS
    }
    return measured


def _measure(context: Context, operation: str) -> Iterator[Row]:
    module = importlib.import_module(f"benchmarks.kernels.{operation}")
    cases: Iterator[KernelCase] = module.cases(torch.device(context.device), smoke=context.smoke)
    for case in cases:
        yield from case_rows(context, case)


def case_rows(context: Context, case: KernelCase) -> Iterator[Row]:
    """Of one case. A kernel that is wrong is not timed."""
    if case.prepare is not None:
        case.prepare()
    output = _run_poisoned(case.run)
    error = relative_error(output, case.reference())
    note = "" if math.isfinite(error) else "another shape, or not finite where it should be"
    right = check(f"{case.name}: relative error", error, "", at_most=case.tolerance, note=note)
    yield right
    if right.outcome == "failed":
        return
    seconds = median_seconds(case.run, prepare=case.prepare)
    ceilings = context.ceilings
    by_bytes, by_flops = case.num_bytes / ceilings.bytes_per_second, case.num_flops / ceilings.flops_per_second
    target = case.target or None
    note = f"{seconds * 1e6:,.1f} us"
    if by_flops > by_bytes:
        limit, rate = ceilings.flops_per_second / 1e12, case.num_flops / seconds / 1e12
        yield speed(case.name, rate, "TFLOP/s", limit=limit, limit_name="product", target=target, note=note)
    else:
        limit, rate = ceilings.bytes_per_second / 1e12, case.num_bytes / seconds / 1e12
        yield speed(case.name, rate, "TB/s", limit=limit, limit_name="copy", target=target, note=note)
    if case.peer is not None:
        peer_seconds = median_seconds(case.peer, prepare=case.prepare)
        peer_rate = rate * seconds / peer_seconds
        name, peer_target = case.peer_name, case.peer_target or None
        unit = "TFLOP/s" if by_flops > by_bytes else "TB/s"
        yield speed(f"{case.name}, beside a peer", rate, unit, limit=peer_rate, limit_name=name, target=peer_target)


def relative_error(output: Tensor, reference: Tensor) -> float:
    """|output - reference| / |reference|, by norm; infinite for another shape and for anything not finite where the
    reference is.
    """
    if output.shape != reference.shape:
        return float("inf")
    wanted, found = reference.double(), output.double()
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return float("inf")
    finite = wanted.isfinite()
    norm = float(wanted[finite].norm())
    difference = float((found[finite] - wanted[finite]).norm())
    return difference / norm if norm else difference


def _run_poisoned(run: Callable[[], Tensor]) -> Tensor:
    """Its output. Memory that it allocates holds NaN at first, so that what a kernel leaves out is seen."""
    # Memory without contents is filled in this mode alone.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)
