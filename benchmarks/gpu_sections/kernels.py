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
from benchmarks.gpu_harness.row import Context, Parts, Row, check, speed
from benchmarks.gpu_harness.timing import median_seconds
from benchmarks.kernels.case import KernelCase

#: Modules that hold no cases.
NOT_OPERATIONS = ("case", "references", "tune")


def operations() -> list[str]:
    """The modules that hold cases."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.kernels.__path__)]
    return [name for name in names if name not in NOT_OPERATIONS]


def parts(context: Context) -> Parts:
    """A part an operation."""
    return {name: functools.partial(_measure, context, name) for name in operations()}


def _measure(context: Context, operation: str) -> Iterator[Row]:
    module = importlib.import_module(f"benchmarks.kernels.{operation}")
    cases: Iterator[KernelCase] = module.cases(torch.device(context.device), smoke=context.smoke)
    for case in cases:
        is_named = operation in case.name
        yield from case_rows(context, case if is_named else case._replace(name=f"{operation} {case.name}"))


def case_rows(context: Context, case: KernelCase) -> Iterator[Row]:
    """Of one case. A kernel that is wrong is not timed."""
    if case.prepare is not None:
        case.prepare()
    output = _run_poisoned(case.run)
    error = relative_error(output, case.reference())
    if not error <= case.tolerance:
        note = "" if math.isfinite(error) else "another shape, or not finite where it should be"
        yield check(f"{case.name}: relative error", error, "", at_most=case.tolerance, note=note)
        return
    ceilings = context.ceilings
    is_bound_by_flops = case.num_flops / ceilings.flops_per_second > case.num_bytes / ceilings.bytes_per_second
    if is_bound_by_flops:
        amount, limit, unit, limit_name = case.num_flops, ceilings.flops_per_second, "TFLOP/s", "product"
    else:
        amount, limit, unit, limit_name = case.num_bytes, ceilings.bytes_per_second, "TB/s", "copy"
    seconds = median_seconds(case.run, prepare=case.prepare)
    rate = amount / seconds / 1e12
    note = f"{seconds * 1e6:,.1f} us; right within {error:.1g}"
    target = case.target or None
    yield speed(case.name, rate, unit, limit=limit / 1e12, limit_name=limit_name, target=target, note=note)
    if case.peer is not None:
        peer_rate = amount / median_seconds(case.peer, prepare=case.prepare) / 1e12
        target = case.peer_target or None
        what = f"{case.name}, beside a peer"
        yield speed(what, rate, unit, limit=peer_rate, limit_name=case.peer_name, target=target)


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
