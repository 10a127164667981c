"""A request as a line of a workload file.

A line has the fields of the request, of its arrival and of its scheduling under their own names. Three things differ,
for people's sake: times that a request brings are decimal seconds or milliseconds; blocks count from 0; and one length
says it all where the outputs are plain.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from eventlm.events import Arrived
from eventlm.replay.workload.workload import NEVER, Cancel, Count, Patience, SequenceOutput, WorkloadRequest
from eventlm.sampling_params import LARGEST_N
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND, ModelRoute, RequestKind

#: 463 days. Rejects times since 1970.
MAX_SECONDS = 40_000_000
MAX_MILLISECONDS = 1_000_000_000

Name = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Tokens = Annotated[int, Meta(ge=1, lt=10**12)]
_OutputTokens = Annotated[int, Meta(ge=0, lt=10**12)]


class WorkloadLine(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request. Seconds and milliseconds are decimal numbers, exact to the nanosecond.

    `max_tokens` above `output_tokens`: the model ends the output; 0: the limit does.

    service_class, priority, deadline_ms, slo_*: as in a request to the server. search_parent: of the scheduling
    parameters, whose `parent` is of another kind. model: None: that of the workload.

    outputs: what each of the `n` sequences generates; empty: each is as `output_tokens` and `max_tokens` say.
    output_blocks: the blocks that each fills, null for one that is not known; empty: none is. received_before_ns,
    ready_before_ns: None: the request does not say when it was received, and when it was ready. All other fields are
    those of `WorkloadRequest`, `Arrived` and `SchedulingParams`.
    """

    arrival_s: Decimal
    prompt_tokens: _Tokens
    output_tokens: _OutputTokens
    max_tokens: _OutputTokens = 0
    blocks: list[Name] = []
    session: Name = 0
    parent: Annotated[int, Meta(ge=-1)] = -1
    think_s: Decimal | None = None
    service_class: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    deadline_ms: Decimal | None = None
    slo_ttft_ms: Decimal | None = None
    slo_tpot_ms: Decimal | None = None
    kind: RequestKind = "generate"
    n: Annotated[int, Meta(ge=1, le=LARGEST_N)] = 1
    group_size: Annotated[int, Meta(ge=1)] = 1
    group_index: Count = 0
    outputs: list[SequenceOutput] = []
    output_blocks: list[list[Name | None]] = []
    cancel: Cancel | None = None
    patience: Patience | None = None
    has_text_ends: bool = False
    waits_for_grammar: bool = False
    grammar_delay_ns: Count = 0
    grammar_error: str = ""
    grammar_s: Count = 0
    received_before_ns: Count | None = None
    ready_before_ns: Count | None = None
    waited_ns: Count = 0
    is_unfinished: bool = False
    model: str | None = None
    adapter: str = ""
    skip_cache_read: bool = False
    drop_if_late: bool = False
    offline: bool = False
    front_end: Count = 0
    asked_model: str = ""
    route: ModelRoute = ""
    search_parent: Name = 0
    seed: str = "0"
    s: Count = 0
    replicaset: Count = 0
    block_size: Count = 0


def _shared_with(struct: type[Struct], *, without: tuple[str, ...]) -> tuple[str, ...]:
    """Fields that a line takes over as they are."""
    return tuple(
        name for name in WorkloadLine.__struct_fields__ if name in struct.__struct_fields__ and name not in without
    )


_OF_ARRIVAL = _shared_with(Arrived, without=("blocks", "max_tokens", "s"))
_OF_SCHEDULING = _shared_with(SchedulingParams, without=("model", "parent"))
_OF_REQUEST = _shared_with(WorkloadRequest, without=("outputs", "received_before_ns", "ready_before_ns"))
_IN_MILLISECONDS = ("deadline", "slo_ttft", "slo_tpot")


def to_line(request: WorkloadRequest, *, model: str) -> WorkloadLine:
    """The line of a request; the workload's requests are for `model`."""
    arrival, scheduling = request.arrival, request.arrival.scheduling
    output_tokens = _output_tokens(request)
    outputs = [structs.replace(output, blocks=[]) for output in request.outputs]
    if outputs == [_plain_output(scheduling.kind, output_tokens, arrival.max_tokens)] * arrival.n:
        outputs = []
    blocks = [_without_shift(output.blocks) for output in request.outputs]
    found: dict[str, Any] = {name: getattr(arrival, name) for name in _OF_ARRIVAL}
    found |= {name: getattr(scheduling, name) for name in _OF_SCHEDULING}
    found |= {name: getattr(request, name) for name in _OF_REQUEST}
    found |= {f"{name}_ms": _milliseconds(getattr(scheduling, f"{name}_ns")) for name in _IN_MILLISECONDS}
    return WorkloadLine(
        **found,
        arrival_s=as_seconds(request.arrival_ns),
        output_tokens=output_tokens,
        max_tokens=arrival.max_tokens if arrival.max_tokens > output_tokens else 0,
        blocks=[name - 1 for name in arrival.blocks],
        think_s=None if request.think_ns is None else as_seconds(request.think_ns),
        outputs=outputs,
        output_blocks=blocks if any(blocks) else [],
        received_before_ns=request.received_before_ns if scheduling.received_ns else None,
        ready_before_ns=request.ready_before_ns if scheduling.ready_ns else None,
        model=None if scheduling.model == model else scheduling.model,
        search_parent=scheduling.parent,
    )


def to_request(line: WorkloadLine, *, model: str) -> WorkloadRequest:
    """The request of a line in a workload for `model`. Raises ValueError for what contradicts itself."""
    _check(line)
    max_tokens = max(line.max_tokens, line.output_tokens)
    outputs = line.outputs or [_plain_output(line.kind, line.output_tokens, max_tokens)] * line.n
    if line.output_blocks:
        outputs = [
            structs.replace(output, blocks=_with_shift(blocks))
            for output, blocks in zip(outputs, line.output_blocks, strict=True)
        ]
    shared: dict[str, Any] = {name: getattr(line, name) for name in _OF_SCHEDULING}
    shared |= {f"{each}_ns": _from_milliseconds(f"{each}_ms", getattr(line, f"{each}_ms")) for each in _IN_MILLISECONDS}
    scheduling = SchedulingParams(
        **shared,
        model=model if line.model is None else line.model,
        parent=line.search_parent,
        # Only whether there is a time counts: a simulation has its own.
        received_ns=int(line.received_before_ns is not None),
        ready_ns=int(line.ready_before_ns is not None),
    )
    arrival = Arrived(
        **{name: getattr(line, name) for name in _OF_ARRIVAL},
        blocks=[name + 1 for name in line.blocks],
        max_tokens=max_tokens,
        scheduling=scheduling,
    )
    return WorkloadRequest(
        **{name: getattr(line, name) for name in _OF_REQUEST},
        arrival=arrival,
        arrival_ns=_from_seconds(line.arrival_s),
        outputs=outputs,
        received_before_ns=line.received_before_ns or 0,
        ready_before_ns=line.ready_before_ns or 0,
        think_ns=None if line.think_s is None else _from_seconds(line.think_s),
    )


def as_seconds(ns: int) -> Decimal:
    """Decimal seconds, exact to the nanosecond."""
    return Decimal(ns) / NANOSECONDS_PER_SECOND


def _check(line: WorkloadLine) -> None:
    if line.kind == "generate" and not line.output_tokens:
        raise ValueError("output_tokens must be 1 or more; only scores and embeddings have none")
    for name in ("outputs", "output_blocks"):
        number = len(getattr(line, name))
        if number not in (0, line.n):
            raise ValueError(f"{name} has {number} entries, but n is {line.n}")
    if line.cancel is not None and line.cancel.index >= line.n:
        raise ValueError(f"cancel.index {line.cancel.index} is not below n, which is {line.n}")
    if line.group_index >= line.group_size:
        raise ValueError(f"group_index {line.group_index} is not below group_size {line.group_size}")


def _output_tokens(request: WorkloadRequest) -> int:
    """The longest output, as far as it is known."""
    if request.arrival.scheduling.kind != "generate":
        return 0
    ends = [
        output.seen_tokens
        if output.seen_tokens is not None
        else min(output.worker_end, output.text_end.position if output.text_end is not None else NEVER)
        for output in request.outputs
    ]
    return max(min(max(ends), request.arrival.max_tokens), 1)


def _plain_output(kind: RequestKind, output_tokens: int, max_tokens: int) -> SequenceOutput:
    if kind != "generate":
        return SequenceOutput(reason="complete")
    if max_tokens > output_tokens:
        return SequenceOutput(worker_end=output_tokens, num_tokens=output_tokens, reason="eos")
    return SequenceOutput(num_tokens=output_tokens, reason="length")


def _without_shift(blocks: list[int]) -> list[int | None]:
    """Names as in a file: from 0, None for a block without one."""
    return [name - 1 if name else None for name in blocks]


def _with_shift(blocks: list[int | None]) -> list[int]:
    return [0 if name is None else name + 1 for name in blocks]


def _milliseconds(ns: int) -> Decimal | None:
    return Decimal(ns) / NANOSECONDS_PER_MILLISECOND if ns else None


def _from_milliseconds(name: str, value: Decimal | None) -> int:
    if value is None:
        return 0
    if not (value.is_finite() and 0 <= value <= MAX_MILLISECONDS):
        raise ValueError(f"{name} must lie between 0 and {MAX_MILLISECONDS}, not {value}")
    return int(value * NANOSECONDS_PER_MILLISECOND)


def _from_seconds(seconds: Decimal) -> int:
    if not (seconds.is_finite() and 0 <= seconds <= MAX_SECONDS):
        raise ValueError(f"a time must lie between 0 and {MAX_SECONDS} seconds, not {seconds}")
    return int(seconds * NANOSECONDS_PER_SECOND)
