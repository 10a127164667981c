"""The binary encoding says what the JSON encoding says."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from eventlm.bus.log_reader import LogReader
from eventlm.telemetry.otlp import encode_spans, resource_of
from eventlm.telemetry.protobuf import encode_request, num_rejected
from eventlm.telemetry.spans import Span
from tests.telemetry.test_spans import TIGHT, spans_of


def with_base64(value: Any) -> Any:
    """Ids as protobuf's own JSON has them, where OTLP has hex digits."""
    if isinstance(value, list):
        return [with_base64(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(each)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else with_base64(each)
        for key, each in value.items()
    }


def test_the_same_as_in_json() -> None:
    spans = spans_of(TIGHT)
    with LogReader(TIGHT) as reader:
        resource = resource_of(reader.header)
    decoded = ExportTraceServiceRequest.FromString(encode_request(spans, resource))
    same = ParseDict(with_base64(json.loads(encode_spans(spans, resource))), ExportTraceServiceRequest())
    assert decoded == same
    found = decoded.resource_spans[0].scope_spans[0].spans
    assert len(found) == len(spans) > 50
    assert any(span.events for span in found)


def test_numbers_and_errors() -> None:
    span = Span(
        name="x", trace_id="01" * 16, span_id="02" * 8, start_ns=1, end_ns=2**62, attributes={"a": 0.5}, error="lost"
    )
    (found,) = ExportTraceServiceRequest.FromString(encode_request([span], {})).resource_spans[0].scope_spans[0].spans
    assert (found.end_time_unix_nano, found.attributes[0].value.double_value) == (2**62, 0.5)
    assert (found.parent_span_id, found.status.message) == (b"", "lost")


def test_rejected_spans_are_read() -> None:
    answer = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=3))
    assert num_rejected(answer.SerializeToString()) == 3
    assert num_rejected(b"") == 0
