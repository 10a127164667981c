"""Writes the spans of a run's requests to a file that OpenTelemetry's collector reads (`otlpjsonfile`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.replay.kept_input import check_keeps_input
from eventlm.system.whole_file import whole_file
from eventlm.telemetry.otlp import encode_spans, resource_of
from eventlm.telemetry.spans import Span, SpanBuilder
from eventlm.types import OnProgress, TimeWindow

#: Spans on one line, which a collector takes as one batch.
BATCH_SPANS = 512


class ExportedSpans(NamedTuple):
    """How many spans were written, and the trace's warnings."""

    num_spans: int
    warnings: list[str]


def export_spans(
    path: Path | str,
    file: Path | str,
    *,
    window: TimeWindow | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportedSpans:
    """Write the spans of the requests of a trace, or of those that arrived in a window of it, as OTLP in JSON lines.

    An existing file is replaced once the new one is whole. Raises UsageError if it cannot be written or is the trace,
    else as LogReader does.
    """
    check_keeps_input(file, path)
    num_spans = 0
    batch: list[Span] = []
    with LogReader(path, strict=strict) as reader, whole_file(Path(file)) as out:
        resource = resource_of(reader.header)

        def flush() -> None:
            if batch:
                out.write(encode_spans(batch, resource) + b"\n")
            batch.clear()

        def emit(span: Span) -> None:
            nonlocal num_spans
            num_spans += 1
            batch.append(span)
            if len(batch) == BATCH_SPANS:
                flush()

        builder = SpanBuilder(emit, window=window)
        reader.fold(builder.apply, on_progress=on_progress)
        builder.finish()
        flush()
        return ExportedSpans(num_spans, reader.warnings())
