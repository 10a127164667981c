"""Finds the configurations of kernels for the GPU at hand and stores them in `kernels/gpu/tuned.toml`.

A module of `benchmarks.kernels` whose kernels have configurations to choose from has, beside `cases`,
`tunings(device, smoke=...)`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pkgutil
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import benchmarks.kernels
from benchmarks.gpu_harness.timing import median_seconds
from benchmarks.gpu_sections.kernels import relative_error
from eventlm.kernels.gpu import tuned
from eventlm.kernels.gpu.tuned import Shape

Config = dict[str, int]

TOLERANCE = 1e-2
_MEASURED_SECONDS = 0.05


class Tuning(NamedTuple):
    """A choice between configurations, which is stored for `shapes`.

    Each of `runs` launches the kernel in another situation that the configuration serves: the winner has the least
    geometric mean of their times. `current` is what is stored now; it is measured first, so that a tuning that time
    cuts short changes nothing for the worse. `references` are what the runs should give, in float32 or float64.
    """

    name: str
    op: str
    shapes: Sequence[Shape]
    current: Config
    candidates: Sequence[Config]
    runs: Sequence[Callable[[Config], Tensor]]
    references: Sequence[Callable[[], Tensor]]


def tune(device: torch.device, budget_seconds: float, *, smoke: bool = False) -> Iterator[str]:
    """Measure all tunings and store the winners; lines of a report as it goes.

    What the budget has no time for keeps its configuration. With `smoke`, tiny shapes on the CPU, into a copy of the
    file that goes afterwards.
    """
    deadline = time.monotonic() + budget_seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copy(tuned.PATH, folder)) if smoke else tuned.PATH
        for module in pkgutil.iter_modules(benchmarks.kernels.__path__):
            find = getattr(importlib.import_module(f"benchmarks.kernels.{module.name}"), "tunings", None)
            for tuning in find(device, smoke=smoke) if find is not None else ():
                yield from _tune(tuning, deadline, path)


def _tune(tuning: Tuning, deadline: float, path: Path) -> Iterator[str]:
    candidates = [tuning.current, *(each for each in tuning.candidates if each != tuning.current)]
    references = [reference() for reference in tuning.references]
    measured: list[tuple[float, Config]] = []
    for index, config in enumerate(candidates):
        if time.monotonic() > deadline:
            yield f"{tuning.name}: no time for {len(candidates) - index} of {len(candidates)}"
            break
        try:
            measured.append((_score(tuning, references, config), config))
        except Exception as error:
            # Some do not fit every GPU.
            first_line = str(error).partition("\n")[0]
            yield f"{tuning.name}: {config}: {type(error).__name__}: {first_line}"
    if not measured:
        return
    seconds, config = min(measured, key=lambda pair: pair[0])
    for shape in tuning.shapes:
        store(tuning.op, shape, config, gpu=tuned.gpu_name(), path=path)
    before = next((f", {before * 1e6:.1f} us before" for before, each in measured if each == tuning.current), "")
    yield f"{tuning.name}: {seconds * 1e6:.1f} us{before}, of {len(measured)}: {config}"


def _score(tuning: Tuning, references: Sequence[Tensor], config: Config) -> float:
    """The geometric mean of the runs' seconds. Raises ValueError for one with a wrong result."""
    logs = []
    for run, reference in zip(tuning.runs, references, strict=True):
        error = relative_error(run(config), reference)
        if not error <= TOLERANCE:
            raise ValueError(f"its relative error is {error:.2g}")
        logs.append(math.log(median_seconds(partial(run, config), measured_seconds=_MEASURED_SECONDS)))
    return math.exp(math.fsum(logs) / len(logs))


def store(op: str, shape: Shape, config: Mapping[str, int], *, gpu: str, path: Path) -> None:
    """Write an entry, in place of the one of the same operation, GPU and shape, if there is one.

    A process that looks up `op` afterwards gets it. Raises OSError where the file cannot be written.
    """
    text = path.read_text()
    entries = tomllib.loads(text)
    others = [entry for entry in entries.get(op, ()) if (entry["gpu"], entry.get("shape", {})) != (gpu, shape)]
    entries[op] = [*others, {"gpu": gpu, "shape": dict(shape), "config": dict(config)}]
    head, _, _ = text.partition("\n[[")
    lines = [head.rstrip("\n")]
    for name in sorted(entries):
        lines += [_text(name, entry) for entry in sorted(entries[name], key=_order)]
    new = path.with_suffix(".new")
    new.write_text("\n\n".join(lines) + "\n")
    os.replace(new, path)
    tuned._entries.cache_clear()
    tuned.tuned.cache_clear()


def _order(entry: Mapping[str, Any]) -> tuple[bool, str, int, list[tuple[str, str, int]]]:
    shape = entry.get("shape", {})
    keys = [
        (name, "" if isinstance(asked, int) else asked, asked if isinstance(asked, int) else 0)
        for name, asked in sorted(shape.items())
    ]
    return entry["gpu"] != tuned.DEFAULT, entry["gpu"], len(shape), keys


def _text(op: str, entry: Mapping[str, Any]) -> str:
    lines = [f"[[{op}]]", f"gpu = {json.dumps(entry['gpu'])}"]
    for key in ("shape", "config"):
        pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in entry.get(key, {}).items())
        lines += [f"{key} = {{ {pairs} }}"] if pairs else []
    return "\n".join(lines)
