"""Converts public traces of real load to workload files, which `simulate` and `bench` read."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from eventlm.errors import UsageError
from eventlm.metrics.trace_metrics import Distribution, distribution
from eventlm.replay.kept_input import check_keeps_input
from eventlm.replay.workload.file import FORMAT_VERSION, WorkloadHeader, write_workload
from eventlm.replay.workload.import_formats import SOURCES, Source, SourceName, SourceRow
from eventlm.replay.workload.request_line import MAX_SECONDS, WorkloadLine, as_seconds
from eventlm.replay.workload.sessions import (
    Link,
    link_by_blocks,
    link_by_name,
    link_by_session,
    number_sessions,
)
from eventlm.types import NANOSECONDS_PER_SECOND, OnProgress, ceil_div

_GZIP_MAGIC = b"\x1f\x8b"
_ROWS_PER_PROGRESS = 16 * 1024


class ImportSummary(Struct, frozen=True, kw_only=True):
    """The result of an import. left_out: requests by reason. num_sorted: rows that followed a later one.

    num_blocks: of all prompts; num_distinct_blocks of them differ. sessions_from: how the sessions are known; empty if
    the source has none. num_turns: requests that continue another.
    """

    source: str
    output: str
    num_requests: int
    left_out: dict[str, int]
    num_sorted: int
    span_ns: int
    prompt_tokens: Distribution
    output_tokens: Distribution
    block_size: int
    num_blocks: int
    num_distinct_blocks: int
    sessions_from: str
    num_sessions: int
    num_turns: int
    num_bytes: int


def import_trace(
    path: Path | str,
    output: Path | str,
    *,
    source: SourceName,
    start_ns: int = 0,
    duration_ns: int | None = None,
    on_progress: OnProgress | None = None,
) -> ImportSummary:
    """Read a public trace and write it as a workload whose first request arrives at 0.

    start_ns, duration_ns: the part to take, counted from its first request. Requests without a prompt or without
    output (a failure, in BurstGPT) are left out: their cost is unknown.
    Raises UsageError that names the line.
    """
    check_keeps_input(output, path)
    kind = SOURCES[source]
    left_out: Counter[str] = Counter()
    chosen = list(_chosen(_rows(str(path), kind, on_progress), left_out, start_ns, duration_ns))
    if not chosen:
        what = f"no request of {path} is left: {_in_words(left_out)}" if left_out else f"{path} holds no request"
        raise UsageError(what)
    num_sorted = sum(after.arrived_ns < before.arrived_ns for before, after in pairwise(chosen))
    chosen.sort(key=lambda row: row.arrived_ns)
    span_ns = chosen[-1].arrived_ns - chosen[0].arrived_ns
    if span_ns > MAX_SECONDS * NANOSECONDS_PER_SECOND:
        raise UsageError(
            f"{path} spans {span_ns / 86_400e9:.1f} days, a workload {MAX_SECONDS / 86_400:.1f} at most: take a part "
            "of it with --start and --duration"
        )
    links, sessions_from = _links(chosen, kind)
    for row in chosen:
        del row.blocks[ceil_div(row.prompt_tokens, kind.block_size or 1) :]
    header = WorkloadHeader(format=FORMAT_VERSION, source=source, block_size=kind.block_size)
    size = write_workload(output, header, _lines(chosen, links))
    return ImportSummary(
        source=source,
        output=str(output),
        num_requests=size.num_requests,
        left_out=dict(left_out.most_common()),
        num_sorted=num_sorted,
        span_ns=span_ns,
        prompt_tokens=distribution(Counter(row.prompt_tokens for row in chosen)),
        output_tokens=distribution(Counter(row.output_tokens for row in chosen)),
        block_size=kind.block_size,
        num_blocks=sum(len(row.blocks) for row in chosen),
        num_distinct_blocks=len({block for row in chosen for block in row.blocks}),
        sessions_from=sessions_from,
        num_sessions=max(number_sessions(links)),
        num_turns=sum(link.parent >= 0 for link in links),
        num_bytes=size.num_bytes,
    )


def _rows(path: str, kind: Source, on_progress: OnProgress | None) -> Iterator[SourceRow]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # A pipe cannot be read twice and has no position.
            content = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP_MAGIC else file
            # Without translation of newlines, which may be part of a quoted CSV value.
            with io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as text:
                for number, row in enumerate(kind.read(path, text)):
                    yield row
                    if on_progress is not None and number % _ROWS_PER_PROGRESS == 0 and file.seekable():
                        on_progress(file.tell(), size)
    except EOFError as error:
        raise UsageError(
            f"{path} is cut short: its compressed data ends before its end mark; fetch it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is damaged: its compressed data cannot be read ({error}); fetch it again") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: byte 0x{error.object[error.start]:02x} is not UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _chosen(
    rows: Iterable[SourceRow], left_out: Counter[str], start_ns: int, duration_ns: int | None
) -> Iterator[SourceRow]:
    """The wanted rows, lazily: the whole trace need not fit in memory."""
    first_ns: int | None = None
    for row in rows:
        first_ns = row.arrived_ns if first_ns is None else first_ns
        after_ns = row.arrived_ns - first_ns - start_ns
        if (start_ns and after_ns < 0) or (duration_ns is not None and after_ns >= duration_ns):
            left_out["outside the requested part"] += 1
        elif row.output_tokens == 0:
            left_out["without output (failed)"] += 1
        elif row.prompt_tokens == 0:
            left_out["without a prompt"] += 1
        else:
            yield row


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {why}" for why, number in counts.most_common())


def _links(rows: Sequence[SourceRow], kind: Source) -> tuple[list[Link], str]:
    """Which request continues which, and how that is known."""
    if any(row.parent_key for row in rows):
        return link_by_name(rows), "named by the trace"
    if any(row.session_key for row in rows):
        return link_by_session(rows), "turns of the trace's sessions"
    if kind.infers_sessions:
        return link_by_blocks(rows, kind.block_size), "inferred from prompts that contain an earlier one and its answer"
    return [Link()] * len(rows), ""


def _lines(rows: Sequence[SourceRow], links: Sequence[Link]) -> Iterator[WorkloadLine]:
    first_ns = rows[0].arrived_ns
    for row, link, session in zip(rows, links, number_sessions(links), strict=True):
        yield WorkloadLine(
            arrival_s=as_seconds(row.arrived_ns - first_ns),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            blocks=row.blocks,
            session=session,
            parent=link.parent,
            think_s=as_seconds(link.think_ns) if link.think_ns is not None else None,
            service_class=row.service_class,
        )
