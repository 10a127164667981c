"""Where spans go: the address that `--otlp-endpoint` names, checked before anything starts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from eventlm.errors import UsageError

#: What an endpoint without a path gets, as OpenTelemetry says.
TRACES_PATH = "/v1/traces"
#: Headers for the endpoint, such as its API key, where OpenTelemetry's libraries look for them; the second wins.
HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_KEY = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def traces_url(endpoint: str) -> str:
    """The URL to post to. Raises UsageError if the endpoint is none, or the extra is missing."""
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(
            f"--otlp-endpoint {endpoint}: not an HTTP URL; give that of a collector's OTLP receiver, such as "
            "http://127.0.0.1:4318"
        )
    if parts.username or parts.password:
        raise UsageError(f"--otlp-endpoint has a password in it, which would be recorded; set {HEADER_VARIABLES[0]}")
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.proto") is None:
        raise UsageError("--otlp-endpoint needs the extra otel: pip install 'eventlm[otel]'")
    return endpoint if parts.path.strip("/") else parts._replace(path=TRACES_PATH).geturl()


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The headers that the environment names: `key=value,...`, values percent-encoded; what is no pair is left out.

    Raises UsageError for what no header may hold, without its value, which may be a key.
    """
    headers = {}
    for variable in HEADER_VARIABLES:
        for pair in environment.get(variable, "").split(","):
            key, is_pair, value = (part.strip() for part in pair.partition("="))
            if not is_pair or not key:
                continue
            headers[key] = unquote(value)
            if not _KEY.fullmatch(key) or _CONTROL.search(headers[key]):
                raise UsageError(f"{variable}: the header {key!r} has characters that no header may have")
    return headers
