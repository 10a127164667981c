"""Workload files: JSON lines, the first says what they are, each other is a request or an incident.

    {"t":"workload","format":2,"source":"mooncake","block_size":512}
    {"arrival_s":0.0,"prompt_tokens":6758,"output_tokens":500,"blocks":[0,1,2]}
    {"arrival_s":1.5,"prompt_tokens":7400,"output_tokens":20,"blocks":[0,1,2,9],"parent":0,"think_s":0.4}
    {"t":"worker_lost","ts":2000000000,"replica":0,"epoch":1,"reason":"killed"}

The fields of the second line other than `blocks` are required; `eventlm.replay.workload.request_line` has all.
`parent` is the index of the request that one continues, counted from 0. Incidents are facts as a trace has them, with
`ts` in nanoseconds on the time axis of `arrival_s`, and may stand anywhere. `eventlm bench serve --trace` reads the
requests of the same files.

Format 1 had no incidents, and none of the fields of a request after `slo_tpot_ms`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union

import msgspec
from msgspec import Meta, Struct

from eventlm.config import CoreConfig
from eventlm.core.predictor import Predictor
from eventlm.errors import UsageError
from eventlm.events import Fact, PredictorSwapped
from eventlm.replay.workload.incidents import INCIDENTS
from eventlm.replay.workload.request_line import MAX_SECONDS, WorkloadLine, to_line, to_request
from eventlm.replay.workload.workload import Count, Workload, WorkloadRequest
from eventlm.system.whole_file import whole_file
from eventlm.types import NANOSECONDS_PER_SECOND

FORMAT_VERSION = 2
#: Of older files, which say the same.
READABLE_FORMATS = (1, FORMAT_VERSION)

#: Tokens of a workload's block. A larger one would be many of an engine's.
MAX_BLOCK_TOKENS = 1 << 16


class WorkloadHeader(
    Struct, frozen=True, kw_only=True, omit_defaults=True, tag="workload", tag_field="t", forbid_unknown_fields=True
):
    """The first line. block_size: of the requests' blocks, in tokens; 0: they have none.

    first_free_name: larger than all blocks' names; 0: the next after the largest. recorded: the limits of the engine
    that the workload is from, which a simulation takes for defaults, and whose model the requests are for. Of an engine
    with several replicasets these are the first one's, replicaset its name, and replicasets the others by their names.
    """

    format: int
    source: str = ""
    block_size: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] = 0
    first_free_name: Count = 0
    recorded: CoreConfig | None = None
    replicaset: str = ""
    replicasets: dict[str, CoreConfig] = {}

    @property
    def model(self) -> str:
        """The model of requests that name none; "": the simulation's."""
        return self.recorded.models[0] if self.recorded is not None else ""

    @property
    def sets(self) -> dict[str, CoreConfig]:
        """The limits of each replicaset by its name. One that is alone is named after its model."""
        return {} if self.recorded is None else {self.replicaset or self.model: self.recorded} | self.replicasets


_encoder = msgspec.json.Encoder(decimal_format="number")
_header_decoder = msgspec.json.Decoder(WorkloadHeader)
_line_decoder = msgspec.json.Decoder(WorkloadLine)
_incident_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[INCIDENTS])  # noqa: UP007


class WorkloadSize(NamedTuple):
    """Size of a written workload."""

    num_requests: int
    num_bytes: int


def write_workload(path: Path | str, header: WorkloadHeader, lines: Iterable[WorkloadLine | Fact]) -> WorkloadSize:
    """Write a workload, whole or not at all; only its owner can read it. Raises UsageError if it cannot be written."""
    num_requests = num_bytes = 0
    with whole_file(Path(path)) as file:
        num_bytes += file.write(_encoder.encode(header) + b"\n")
        for line in lines:
            num_bytes += file.write(_encoder.encode(line) + b"\n")
            num_requests += isinstance(line, WorkloadLine)
    return WorkloadSize(num_requests, num_bytes)


def save_workload(path: Path | str, workload: Workload) -> WorkloadSize:
    """Write a workload so that `read_workload` gives one that runs alike. Raises UsageError."""
    return write_workload(path, *_parts(workload))


def encode_workload(workload: Workload) -> bytes:
    """The content of the file that `save_workload` writes."""
    header, lines = _parts(workload)
    return b"".join(_encoder.encode(line) + b"\n" for line in (header, *lines))


def _parts(workload: Workload) -> tuple[WorkloadHeader, Iterable[WorkloadLine | Fact]]:
    sets: list[tuple[str, CoreConfig | None]] = [*workload.recorded.items()]
    (name, first), *others = sets or [("", None)]
    header = WorkloadHeader(
        format=FORMAT_VERSION,
        source=workload.source,
        block_size=workload.block_size,
        first_free_name=workload.first_free_name,
        recorded=first,
        replicaset=name if others else "",
        replicasets={each: core for each, core in others if core is not None},
    )
    return header, chain(workload.incidents, (to_line(request, model=header.model) for request in workload.requests))


def read_workload(path: Path | str) -> Workload:
    """Read a workload file. Raises UsageError that names the line."""
    try:
        return decode_workload(Path(path).read_bytes(), path)
    except OSError as error:
        raise UsageError(f"cannot read the workload {path}: {error.strerror}") from error


def decode_workload(content: bytes, path: Path | str) -> Workload:
    """The workload of a file's content. Raises UsageError that names the line."""
    first, _, rest = content.partition(b"\n")
    try:
        header = _header_decoder.decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not a workload file ({error}); `eventlm trace import` makes one from a public trace"
        ) from error
    if header.format not in READABLE_FORMATS:
        formats = " and ".join(map(str, READABLE_FORMATS))
        raise UsageError(f"{path} is a workload of format {header.format}, this version reads {formats}")
    reader = _Reader(header)
    for number, text in enumerate(rest.split(b"\n"), 2):
        if text.strip():
            try:
                reader.take(text)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, UsageError) as error:
                raise UsageError(f"{path}:{number}: {error}") from error
    requests = reader.requests
    if not requests:
        raise UsageError(f"{path}: there is no request in this workload")
    if reader.num_missing:
        raise UsageError(f"{path}: its last group lacks {reader.num_missing} of its requests")
    return Workload(
        source=header.source or str(path),
        requests=requests,
        block_size=header.block_size,
        first_free_name=max(1 + max(map(_last_name, requests)), header.first_free_name),
        incidents=sorted(reader.incidents, key=lambda fact: (fact.ts, fact.s)),
        recorded=header.sets,
    )


class _Reader:
    """Takes the lines after the first. num_missing: how many requests the last group still lacks."""

    def __init__(self, header: WorkloadHeader) -> None:
        self.requests: list[WorkloadRequest] = []
        self.incidents: list[Fact] = []
        self.num_missing = 0
        self._header = header

    def take(self, text: bytes) -> None:
        """Take a line. Raises ValueError and what msgspec raises."""
        # No string can contain these bytes: its quotes would be escaped.
        if b'"t":' in text:
            self._incident(_incident_decoder.decode(text))
        else:
            self._request(_line_decoder.decode(text))

    def _incident(self, fact: Fact) -> None:
        if not 0 <= fact.ts <= MAX_SECONDS * NANOSECONDS_PER_SECOND:
            raise ValueError(f"ts must lie between 0 and {MAX_SECONDS} seconds, not {fact.ts} ns")
        if getattr(fact, "replica", 0) < 0:
            raise ValueError("a replica is 0 or more")
        if isinstance(fact, PredictorSwapped):
            Predictor.from_coefficients(fact.coefficients)
        self.incidents.append(fact)

    def _request(self, line: WorkloadLine) -> None:
        request = to_request(line, model=self._header.model)
        before = self.requests[-1] if self.requests else None
        if before is not None and request.arrival_ns < before.arrival_ns:
            raise ValueError("it arrives before the request above it; sort the file by arrival_s")
        if not self._header.block_size and (line.blocks or any(line.output_blocks)):
            raise ValueError("it has blocks, but the first line has no block_size")
        if line.parent >= len(self.requests):
            raise ValueError(f"its parent {line.parent} is not above it")
        if self.num_missing and before is not None:
            wanted = before.arrival.group_size, before.arrival.group_index + 1, before.arrival_ns
        else:
            wanted = line.group_size, 0, request.arrival_ns
        if (line.group_size, line.group_index, request.arrival_ns) != wanted:
            raise ValueError("a group's requests follow each other, arrive together and count group_index from 0")
        self.num_missing = line.group_size - line.group_index - 1
        self.requests.append(request)


def _last_name(request: WorkloadRequest) -> int:
    """The largest name of a block of a request, 0 if it has none."""
    names = [request.arrival.blocks, *(output.blocks for output in request.outputs)]
    return max((max(blocks) for blocks in names if blocks), default=0)
