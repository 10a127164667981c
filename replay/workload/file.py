"""Workload files: JSON lines, the first says what they are, each other is a request.

    {"t":"workload","format":1,"source":"mooncake","block_size":512}
    {"arrival_s":0.0,"prompt_tokens":6758,"output_tokens":500,"blocks":[0,1,2]}
    {"arrival_s":1.5,"prompt_tokens":7400,"output_tokens":20,"blocks":[0,1,2,9],"parent":0,"think_s":0.4}

The fields of the second line other than `blocks` are required. `parent` is the index of the request that one continues,
counted from 0. `eventlm bench serve --trace` reads the same files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from eventlm.errors import UsageError
from eventlm.events import Arrived
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

FORMAT_VERSION = 1
#: 463 days. Rejects times since 1970.
MAX_SECONDS = 40_000_000

Name = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Tokens = Annotated[int, Meta(ge=1, lt=10**12)]
_Milliseconds = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class WorkloadHeader(Struct, frozen=True, kw_only=True, tag="workload", tag_field="t", forbid_unknown_fields=True):
    """The first line. block_size: of the requests' blocks, in tokens; 0: they have none."""

    format: int = FORMAT_VERSION
    source: str = ""
    block_size: Annotated[int, Meta(ge=0)] = 0


class WorkloadLine(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request. Seconds are decimal numbers, exact to the nanosecond.

    `max_tokens` above `output_tokens`: the model ends the output; 0: the limit does.

    service_class, priority, deadline_ms, slo_*: as in a request to the server.
    """

    arrival_s: Decimal
    prompt_tokens: _Tokens
    output_tokens: _Tokens
    max_tokens: Annotated[int, Meta(ge=0, lt=10**12)] = 0
    blocks: list[Name] = []
    session: Name = 0
    parent: Annotated[int, Meta(ge=-1)] = -1
    think_s: Decimal | None = None
    service_class: str = ""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    deadline_ms: _Milliseconds = 0
    slo_ttft_ms: _Milliseconds = 0
    slo_tpot_ms: _Milliseconds = 0


_header_decoder = msgspec.json.Decoder(WorkloadHeader)
_line_decoder = msgspec.json.Decoder(WorkloadLine)


class WorkloadSize(NamedTuple):
    """Size of a written workload."""

    num_requests: int
    num_bytes: int


def write_workload(path: Path | str, header: WorkloadHeader, lines: Iterable[WorkloadLine]) -> WorkloadSize:
    """Write a workload, whole or not at all. Raises UsageError if the file cannot be written."""
    # Write through a symbolic link. Do not replace a device.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write the workload {path}: it is not a file; choose another")
    partial = target.with_name(f".{target.name}.partial")
    encoder = msgspec.json.Encoder(decimal_format="number")
    num_requests = 0
    try:
        with partial.open("wb") as file:
            file.write(encoder.encode(header) + b"\n")
            for line in lines:
                file.write(encoder.encode(line) + b"\n")
                num_requests += 1
            num_bytes = file.tell()
        partial.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write the workload {path}: {error.strerror}; choose another file") from error
    finally:
        partial.unlink(missing_ok=True)
    return WorkloadSize(num_requests, num_bytes)


def read_workload(path: Path | str) -> Workload:
    """Read a workload file. Raises UsageError that names the line."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from error
    first, _, rest = content.partition(b"\n")
    try:
        header = _header_decoder.decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a workload file ({error}); `eventlm trace import` makes one from a public trace"
        ) from error
    if header.format != FORMAT_VERSION:
        raise UsageError(f"{path} is a workload of format {header.format}, this version reads {FORMAT_VERSION}")
    requests = list(_requests(path, rest, has_blocks=header.block_size > 0))
    if not requests:
        raise UsageError(f"{path}: there is no request in this workload")
    return Workload(
        source=header.source or str(path),
        requests=requests,
        block_size=header.block_size,
        first_free_name=1 + max((max(r.arrival.blocks) for r in requests if r.arrival.blocks), default=0),
    )


def _requests(path: Path | str, content: bytes, *, has_blocks: bool) -> Iterator[WorkloadRequest]:
    before_ns = num_above = 0
    for number, text in enumerate(content.split(b"\n"), 2):
        if not text.strip():
            continue
        try:
            line = _line_decoder.decode(text)
            request = _request(line)
        except (msgspec.DecodeError, ValueError) as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        if request.arrival_ns < before_ns:
            raise UsageError(f"{path}:{number}: it arrives before the request above it; sort the file by arrival_s")
        if line.blocks and not has_blocks:
            raise UsageError(f"{path}:{number}: it has blocks, but the first line has no block_size")
        if line.parent >= num_above:
            raise UsageError(f"{path}:{number}: its parent {line.parent} is not above it")
        before_ns = request.arrival_ns
        num_above += 1
        yield request


def _request(line: WorkloadLine) -> WorkloadRequest:
    if line.max_tokens > line.output_tokens:
        output = SequenceOutput(worker_end=line.output_tokens, num_tokens=line.output_tokens, reason="eos")
    else:
        output = SequenceOutput(num_tokens=line.output_tokens, reason="length")
    arrival = Arrived(
        prompt_tokens=line.prompt_tokens,
        blocks=[name + 1 for name in line.blocks],
        max_tokens=max(line.max_tokens, line.output_tokens),
        scheduling=SchedulingParams(
            # The simulation fills in its own.
            model="",
            priority=line.priority,
            deadline_ns=line.deadline_ms * NANOSECONDS_PER_MILLISECOND,
            slo_ttft_ns=line.slo_ttft_ms * NANOSECONDS_PER_MILLISECOND,
            slo_tpot_ns=line.slo_tpot_ms * NANOSECONDS_PER_MILLISECOND,
            service_class=line.service_class,
            session=line.session,
        ),
    )
    return WorkloadRequest(
        arrival=arrival,
        arrival_ns=_nanoseconds(line.arrival_s),
        outputs=[output],
        parent=line.parent,
        think_ns=None if line.think_s is None else _nanoseconds(line.think_s),
    )


def _nanoseconds(seconds: Decimal) -> int:
    if not (seconds.is_finite() and 0 <= seconds <= MAX_SECONDS):
        raise ValueError(f"a time must lie between 0 and {MAX_SECONDS} seconds, not {seconds}")
    return int(seconds * NANOSECONDS_PER_SECOND)
