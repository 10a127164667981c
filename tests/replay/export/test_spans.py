"""OTLP files: lines that a collector takes, with every span once."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.replay.export import spans as spans_module
from eventlm.replay.export.spans import export_spans
from tests.replay.golden import FOLDER
from tests.telemetry.test_otlp import decoded
from tests.telemetry.test_spans import spans_of

TIGHT = FOLDER / "edf_tight.jsonl"


def test_every_span_once_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "BATCH_SPANS", 7)
    exported = export_spans(TIGHT, tmp_path / "spans.json")
    lines = [decoded(line) for line in (tmp_path / "spans.json").read_bytes().splitlines()]
    found = [
        (span.name, span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano)
        for request in lines
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]
    assert [len(line.resource_spans[0].scope_spans[0].spans) for line in lines[:-1]] == [7] * (len(lines) - 1)
    expected = spans_of(TIGHT)
    assert exported.num_spans == len(expected)
    assert found == [(each.name, each.span_id, each.parent_id, each.start_ns, each.end_ns) for each in expected]
