"""OTLP in JSON, decoded with OpenTelemetry's own protobufs, which know no other fields."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from eventlm.bus.log_reader import LogReader
from eventlm.telemetry.otlp import encode_spans, resource_of
from eventlm.telemetry.spans import ROOT_NAME, Span, SpanEvent
from tests.replay.golden import FOLDER


def decoded(line: bytes) -> ExportTraceServiceRequest:
    """Ids are hex digits in OTLP, and base64 in the JSON of other protocols."""

    def as_base64(item: dict[str, Any]) -> dict[str, Any]:
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in item:
                item[key] = base64.b64encode(bytes.fromhex(item[key])).decode()
        return item

    request: ExportTraceServiceRequest = json_format.ParseDict(
        json.loads(line, object_hook=as_base64), ExportTraceServiceRequest()
    )
    return request


def test_a_span_comes_out_as_it_went_in() -> None:
    root = Span(
        name=ROOT_NAME,
        trace_id="0" * 31 + "a",
        span_id="b" * 16,
        start_ns=1_795_746_080_196_420_842,
        end_ns=1_795_746_081_196_420_843,
        attributes={"text": "</script>\n\u2028é", "whole": 1 << 60, "part": 0.25, "list": ["eos", "length"]},
        events=[SpanEvent("preempted", 1_795_746_080_500_000_001, {"by": "17"})],
        error="error",
    )
    child = Span(name="queue", trace_id=root.trace_id, span_id="c" * 16, parent_id=root.span_id, start_ns=5, end_ns=7)
    line = encode_spans([root, child], {"service.name": "eventlm", "service.version": "1.2"})
    assert b"\n" not in line
    (resource_spans,) = decoded(line).resource_spans
    assert [(each.key, each.value.string_value) for each in resource_spans.resource.attributes] == [
        ("service.name", "eventlm"),
        ("service.version", "1.2"),
    ]
    (scope_spans,) = resource_spans.scope_spans
    assert (scope_spans.scope.name, scope_spans.scope.version) == ("eventlm", "1.2")
    first, second = scope_spans.spans
    assert (first.trace_id.hex(), first.span_id.hex(), first.parent_span_id) == (root.trace_id, root.span_id, b"")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (root.start_ns, root.end_ns)
    assert (first.kind, second.kind) == (ProtoSpan.SPAN_KIND_SERVER, ProtoSpan.SPAN_KIND_INTERNAL)
    assert (first.status.code, first.status.message) == (Status.STATUS_CODE_ERROR, "error")
    assert second.status.code == Status.STATUS_CODE_UNSET
    values = {each.key: each.value for each in first.attributes}
    assert values["text"].string_value == root.attributes["text"]
    assert values["whole"].int_value == 1 << 60
    assert values["part"].double_value == pytest.approx(0.25)
    assert [each.string_value for each in values["list"].array_value.values] == ["eos", "length"]
    assert [(event.name, event.time_unix_nano) for event in first.events] == [("preempted", root.events[0].ns)]
    assert second.parent_span_id.hex() == root.span_id


def test_the_resource_is_the_run() -> None:
    with LogReader(FOLDER / "edf_tight.jsonl") as reader:
        resource = resource_of(reader.header)
        assert resource["service.instance.id"] == reader.header.run
    assert resource["eventlm.policy"] == "edf"
