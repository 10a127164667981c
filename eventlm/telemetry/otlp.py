"""Spans in the JSON encoding of OTLP, as `POST /v1/traces` takes it and a collector's `otlpjsonfile` receiver reads it.

Ids are hex digits and 64-bit integers are strings, as the protocol says for JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from eventlm.events import Header
from eventlm.telemetry.spans import ROOT_NAME, Attribute, Attributes, Span

#: Of the protocol: `SPAN_KIND_INTERNAL`, `SPAN_KIND_SERVER`, `STATUS_CODE_ERROR`.
_INTERNAL, _SERVER, _ERROR = 1, 2, 2


def resource_of(header: Header) -> Attributes:
    """The attributes of what made the spans: this run of the engine."""
    return {
        "service.name": "eventlm",
        "service.version": header.code_version,
        "service.instance.id": header.run,
        "eventlm.policy": next(record.name for record in header.plugins if record.kind == "policy"),
    }


def encode_spans(spans: Iterable[Span], resource: Attributes) -> bytes:
    """One `ExportTraceServiceRequest`, without a newline in it."""
    version = str(resource.get("service.version", ""))
    scope_spans = [{"scope": {"name": "eventlm", "version": version}, "spans": [_as_object(span) for span in spans]}]
    whole = {"resourceSpans": [{"resource": {"attributes": _as_list(resource)}, "scopeSpans": scope_spans}]}
    return msgspec.json.encode(whole)


def _as_object(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": _SERVER if span.name == ROOT_NAME else _INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _as_list(span.attributes),
    }
    if span.parent_id:
        found["parentSpanId"] = span.parent_id
    if span.events:
        found["events"] = [
            {"name": event.name, "timeUnixNano": str(event.ns), "attributes": _as_list(event.attributes)}
            for event in span.events
        ]
    if span.error:
        found["status"] = {"code": _ERROR, "message": span.error}
    return found


def _as_list(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _as_value(value)} for key, value in attributes.items()]


def _as_value(value: Attribute) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_as_value(each) for each in value]}}
