"""The fields of log lines about the ends of requests and of replies. None has content."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.errors import CANCELLED, ApiError
from eventlm.text.generation import Generation


def request_fields(request: web.Request) -> dict[str, Any]:
    """What was asked for, and by which key."""
    # In its quoted form: a decoded path may have control characters.
    fields: dict[str, Any] = {"method": request.method, "path": request.rel_url.raw_path}
    principal = request.get(PRINCIPAL)
    if principal is not None and principal.name:
        fields["key"] = principal.name
    return fields


def error_fields(error: ApiError) -> dict[str, Any]:
    """The error that ended a reply early, which no status shows."""
    body = error.envelope.error
    outcome = "cancelled" if error.status == CANCELLED else "cut"
    return {"outcome": outcome, "error": body.code or body.type, "error_status": error.status}


def generation_fields(generation: Generation, started_ns: int) -> dict[str, Any]:
    """What was generated for a request that began at `started_ns` of the engine's clock."""
    counts = generation.token_counts()
    fields: dict[str, Any] = {"prompt_tokens": counts.prompt, "output_tokens": generation.num_tokens}
    if generation.knows_cached_tokens:
        fields["cached_tokens"] = counts.cached
    if generation.first_token_ns:
        fields["ttft_ms"] = (generation.first_token_ns - started_ns) // 1_000_000
    if generation.finish_reasons:
        fields["finish_reason"] = ",".join(sorted(generation.finish_reasons))
    if generation.num_choices > 1:
        fields["choices"] = generation.num_choices
    return fields
