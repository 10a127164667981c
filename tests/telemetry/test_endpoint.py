"""Addresses of OTLP receivers, and headers for them."""

from __future__ import annotations

import importlib.util

import pytest

from eventlm.errors import UsageError
from eventlm.telemetry.endpoint import headers_of, traces_url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://otel.example.com/", "https://otel.example.com/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_urls(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://x:4317", "http://", "http://x:99999", "http://[::1"])
def test_what_is_no_url(endpoint: str) -> None:
    with pytest.raises(UsageError, match="not an HTTP URL"):
        traces_url(endpoint)


def test_passwords_are_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        traces_url("http://me:secret@x")
    assert "secret" not in str(caught.value)


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'eventlm\[otel\]'"):
        traces_url("http://127.0.0.1:4318")


def test_headers() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc, x-tenant = a ,nothing,=b",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-tenant=b=c",
    }
    assert headers_of(environment) == {"authorization": "Bearer abc", "x-tenant": "b=c"}
    assert headers_of({}) == {}


@pytest.mark.parametrize("text", ["x=secret%0Ab", "x=secret%00", "a b=secret", "ä=secret", "x=secret%7f"])
@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_what_no_header_may_have_is_refused_and_not_shown(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=variable) as caught:
        headers_of({variable: f"ok=1,{text}"})
    assert "secret" not in str(caught.value)
