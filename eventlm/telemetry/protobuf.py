"""Spans in the binary encoding of OTLP, which every collector takes. It needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp

from eventlm.telemetry.spans import ROOT_NAME, Attribute, Attributes, Span


def encode_request(spans: Iterable[Span], resource: Attributes) -> bytes:
    """One `ExportTraceServiceRequest`, the body of `POST /v1/traces`."""
    scope = InstrumentationScope(name="eventlm", version=str(resource.get("service.version", "")))
    scope_spans = otlp.ScopeSpans(scope=scope, spans=[_message(span) for span in spans])
    whole = otlp.ResourceSpans(resource=Resource(attributes=_pairs(resource)), scope_spans=[scope_spans])
    body: bytes = ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()
    return body


def num_rejected(response: bytes) -> int:
    """Of the spans of a request that succeeded, how many its response says were rejected. Raises DecodeError."""
    count: int = ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans
    return count


def _message(span: Span) -> otlp.Span:
    is_root = span.name == ROOT_NAME
    return otlp.Span(
        name=span.name,
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        kind=otlp.Span.SPAN_KIND_SERVER if is_root else otlp.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_pairs(span.attributes),
        events=[
            otlp.Span.Event(name=event.name, time_unix_nano=event.ns, attributes=_pairs(event.attributes))
            for event in span.events
        ],
        status=otlp.Status(code=otlp.Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
    )


def _pairs(attributes: Mapping[str, Attribute]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Attribute) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(each) for each in value]))
