"""Cross-origin requests: which web pages may use the server from a browser. By default none."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.context import CONTEXT

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
#: How long a browser may cache the reply to a preflight.
_MAX_AGE_SECONDS = 600
_METHODS = "DELETE, GET, HEAD, OPTIONS, POST"
#: Headers that pages may read, beside those that browsers always allow.
_EXPOSED = ", ".join(
    [
        "x-request-id",
        "request-id",
        "retry-after",
        *(f"x-ratelimit-{name}-{kind}" for kind in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
    ]
)


def check_origins(config: ServerConfig) -> None:
    """Raise UsageError for an invalid origin."""
    for origin in config.cors_origin:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--cors-origin {origin}: an origin is written scheme://host or scheme://host:port, without a path; "
                "or * for all"
            )


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser's preflight request, which has no key."""
    is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_preflight or not _allowed(request):
        return await handler(request)
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ANY),
        "Access-Control-Max-Age": str(_MAX_AGE_SECONDS),
    }
    return web.Response(status=204, headers=headers)


async def set_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: allow the page to read the reply."""
    allowed = _allowed(request)
    if allowed:
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
    if ANY not in request.app[CONTEXT].config.cors_origin:
        response.headers["Vary"] = "Origin"


def _allowed(request: web.Request) -> str:
    """The origin to allow; empty for none. API keys are not credentials in the sense of CORS."""
    origins = request.app[CONTEXT].config.cors_origin
    origin = request.headers.get("Origin", "")
    if not origin:
        return ""
    return ANY if ANY in origins else origin if origin in origins else ""
