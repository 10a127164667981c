"""Indexes the segments of a run in several processes, each from its segment's own snapshot.

A part is trusted only where the whole would give the same: every segment begins where the one before it ended, with the
same hash and the same state. Otherwise there are no parts, and the caller reads the run from its start, which tells
what is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct, structs

from eventlm.bus.segment_reader import SegmentReader
from eventlm.errors import EventLMError
from eventlm.events import Header
from eventlm.replay.index.file import BrokenIndexError, read_index
from eventlm.replay.index.merge import IndexPart, Merger
from eventlm.types import OnProgress

_COMMAND = (sys.executable, "-m", "eventlm.replay.index.worker")


class PartRequest(Struct, frozen=True, kw_only=True):
    """One segment for a process, and the file for its index."""

    segment: str
    output: str
    trust_local_plugins: bool = False


class PartResponse(Struct, frozen=True, kw_only=True):
    """How a segment begins and ends: its states as hashes; "" where it has none. is_whole: it was read to its end
    without a difference."""

    is_whole: bool = False
    state_at_start: str = ""
    state_at_end: str = ""
    next_s: int = 0
    last_ns: int = 0
    last_h: str = ""


class JoinedIndex(NamedTuple):
    """The index of all segments, and how the last one ends."""

    part: IndexPart
    end: PartResponse


def index_segments(
    segments: Sequence[Path],
    *,
    num_jobs: int,
    trust_local_plugins: bool,
    on_progress: OnProgress | None = None,
) -> JoinedIndex | None:
    """The joined index of all segments; None if they cannot be indexed one by one."""
    headers = _headers(segments)
    if headers is None:
        return None
    sizes = [path.stat().st_size for path in segments]
    merger = Merger()
    before: PartResponse | None = None
    num_bytes = 0
    with tempfile.TemporaryDirectory(prefix="eventlm-index-") as folder, _Processes(num_jobs) as processes:
        requests = [
            PartRequest(
                segment=str(path), output=str(Path(folder) / f"{number}.index"), trust_local_plugins=trust_local_plugins
            )
            for number, path in enumerate(segments)
        ]
        for request, header, size, response in zip(
            requests, headers, sizes, processes.responses(requests), strict=True
        ):
            if not response.is_whole or (before is not None and not _follows(before, header, response)):
                return None
            try:
                content = read_index(Path(request.output))
                merger.add(IndexPart(content.names, content.tables, content.snapshots))
            except (OSError, BrokenIndexError):
                return None
            Path(request.output).unlink()
            before = response
            num_bytes += size
            if on_progress is not None:
                on_progress(num_bytes, sum(sizes))
    return None if before is None else JoinedIndex(merger.merged(), before)


def _headers(segments: Sequence[Path]) -> list[Header] | None:
    """The headers of all segments, if they are of one run."""
    headers = []
    for path in segments:
        try:
            with SegmentReader(path) as reader:
                headers.append(reader.header)
        except EventLMError:
            return None
    own = [structs.replace(header, s=0, ts=0, c=0, previous_h="") for header in headers]
    return headers if all(header == own[0] for header in own) else None


def _follows(before: PartResponse, header: Header, response: PartResponse) -> bool:
    joins = (header.s, header.previous_h) == (before.next_s, before.last_h)
    return joins and response.state_at_start == before.state_at_end != ""


class _Processes:
    """At most `num_jobs` processes at a time, one for each request. They exchange JSON."""

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        self._running: deque[subprocess.Popen[bytes]] = deque()

    def responses(self, requests: Sequence[PartRequest]) -> Iterator[PartResponse]:
        """The responses in order. A process that dies gives an empty one."""
        waiting = deque(requests)
        for _ in requests:
            while waiting and len(self._running) < self._num_jobs:
                self._running.append(_start(waiting.popleft()))
            process = self._running[0]
            output, _ = process.communicate()
            self._running.popleft()
            try:
                yield msgspec.json.decode(output, type=PartResponse)
            except msgspec.DecodeError:
                yield PartResponse()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate()


def _start(request: PartRequest) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(request))
    process.stdin.close()
    process.stdin = None
    return process
