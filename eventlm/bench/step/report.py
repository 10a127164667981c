"""What `eventlm bench step` has measured, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from eventlm.bench.step.floor import ModelFigures, floor_ns, step_work, total
from eventlm.bench.step.machine_probe import Machine
from eventlm.bench.step.measure import ENGINE, EXCHANGE, TRANSPORT, CaseResult, MeasuredStep
from eventlm.table import table

#: The rows of a table, and the operations of each. What is not named here is the worker's preparation. A model has
#: either experts or a dense part in each layer.
_FORWARD = {
    "qkv_proj": ("qkv_proj",),
    "attention": ("attention",),
    "recurrent": ("recurrent",),
    "layer_inputs": ("layer_inputs",),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_up_proj",),
    "down_proj": ("down_proj",),
    "router": ("router",),
    "experts": ("experts",),
    "lm_head": ("lm_head",),
    "rotary and store": ("rotary",),
    "norms and embed": ("norm", "embed"),
    "waiting for peers": ("meeting",),
    "sums of peers": ("add_parts",),
    "exchange": (EXCHANGE,),
}
_AROUND = {"sampling": ("sample",), TRANSPORT: (TRANSPORT,), ENGINE: (ENGINE,)}
_PREPARATION = "preparation"
#: For a worker that measures the rotary embedding and the store together with the product that they follow.
_ROTARY, _WITH_ROTARY = "rotary", "qkv_proj"
_ROW_OF = {op: row for row, ops in (_FORWARD | _AROUND).items() for op in ops}


class PartTime(Struct, frozen=True, kw_only=True):
    """A part of a step. floor_ms: None where there is nothing that it must read or multiply."""

    name: str
    ms: float
    floor_ms: float | None = None


class CaseTimes(Struct, frozen=True, kw_only=True):
    """A case, averaged over the middle half of its steps by duration. Its floor is the longer of all its bytes and all
    its FLOPs. engine_share: of the step, all that is not the model's forward pass. engine_cpu_ms: processor time
    of the engine's process, mostly while the worker computes.
    """

    name: str
    batch: int
    context_tokens: float
    num_steps: int
    parts: list[PartTime]
    ms: float
    floor_ms: float | None
    tokens_per_second: float
    engine_share: float
    engine_cpu_ms: float


def case_times(result: CaseResult, machine: Machine, model: ModelFigures | None) -> CaseTimes:
    """The times of a case; without a model there are no floors."""
    steps = middle_half(result.steps)
    shape = steps[len(steps) // 2].shape
    work = step_work(model, shape) if model else {}
    spent = dict.fromkeys((*_FORWARD, "sampling", _PREPARATION, TRANSPORT, ENGINE), 0.0)
    if not any(_ROTARY in step.ops for step in steps):
        del spent[_ROW_OF[_ROTARY]]
        if work:
            work[_WITH_ROTARY] = total([work[_WITH_ROTARY], work.pop(_ROTARY)])
    known = {*work, *(op for step in steps for op in step.ops)}
    for row, ops in _FORWARD.items():
        if known.isdisjoint(ops):
            spent.pop(row, None)
    for step in steps:
        for op, time_ns in step.ops.items():
            spent[_ROW_OF.get(op, _PREPARATION)] += time_ns / len(steps)
    step_ns = sum(spent.values())
    forward_ns = sum(spent[row] for row in _FORWARD if row in spent)
    floors = {_ROW_OF[op]: floor_ns(each, machine) / 1e6 for op, each in work.items()}
    return CaseTimes(
        name=str(result.case),
        batch=result.case.batch,
        context_tokens=shape.kv_tokens() / max(result.case.batch, 1),
        num_steps=len(result.steps),
        parts=[PartTime(name=row, ms=time_ns / 1e6, floor_ms=floors.get(row)) for row, time_ns in spent.items()],
        ms=step_ns / 1e6,
        floor_ms=floor_ns(total(work.values()), machine) / 1e6 if work else None,
        tokens_per_second=shape.num_tokens / step_ns * 1e9,
        engine_share=1 - forward_ns / step_ns,
        engine_cpu_ms=result.engine_cpu_ns / 1e6,
    )


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The steps without the quickest and the slowest quarter, in the order of their duration."""
    ordered = sorted(steps, key=lambda step: step.duration_ns)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]


def step_lines(model_name: str, backend: str, machine: Machine, cases: Sequence[CaseTimes]) -> Iterator[str]:
    """A table for each case, and one of all."""
    yield f"model    {model_name}{f', {backend}' if backend else ''}"
    yield f"machine  {machine}"
    for case in cases:
        yield ""
        yield f"{case.name} ({case.num_steps} steps)"
        yield from table(_PARTS, list(_part_rows(case)))
    yield ""
    yield from table(_TOTALS, [_total_row(case) for case in cases])


_PARTS = ("part", "ms", "share", "floor ms", "x floor")
_TOTALS = ("all cases", "step ms", "tokens/s", "floor ms", "x floor", "engine's share", "engine's CPU ms")


def _part_rows(case: CaseTimes) -> Iterator[tuple[str, ...]]:
    for part in case.parts:
        yield (part.name, f"{part.ms:.2f}", f"{part.ms / case.ms:.1%}", *_floor_cells(part.ms, part.floor_ms))
    yield ("step", f"{case.ms:.2f}", "100.0%", *_floor_cells(case.ms, case.floor_ms))


def _total_row(case: CaseTimes) -> tuple[str, ...]:
    return (
        case.name,
        f"{case.ms:.2f}",
        f"{case.tokens_per_second:.1f}",
        *_floor_cells(case.ms, case.floor_ms),
        f"{case.engine_share:.1%}",
        f"{case.engine_cpu_ms:.2f}",
    )


def _floor_cells(time_ms: float, floor_ms: float | None) -> tuple[str, str]:
    if not floor_ms:
        return "-", "-"
    return f"{floor_ms:.2f}", f"{time_ms / floor_ms:.2f}"


def as_json(model_name: str, backend: str, machine: Machine, cases: Sequence[CaseTimes]) -> dict[str, Any]:
    """The report as one object."""
    return {"model": model_name, "attention_backend": backend, "machine": machine, "cases": list(cases)}
