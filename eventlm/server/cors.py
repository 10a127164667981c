"""Which web pages may use the server from a browser: by default only its own."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.context import CONTEXT
from eventlm.server.errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ANY = "*"
_LOCAL_DOMAINS = (".localhost", ".internal", ".local")
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
        "x-eventlm-model",
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
async def refuse_foreign_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a page of another site could have a browser send without asking: forms, and names of its own that
    lead to this machine (DNS rebinding). With a key a request is nobody else's.
    """
    context = request.app[CONTEXT]
    if not context.keys:
        host = request.headers.get("Host", "")
        if is_loopback(context.config.host) and not _names_this_machine(host, context.config.allowed_host):
            name = _hostname(host)
            raise ApiError(
                403,
                f"A server without API keys on this machine does not answer to the host '{name}': start it with "
                f"--allowed-host {name}, or with keys.",
                code="host_not_allowed",
            )
        if _is_form(request) and not _allowed(request):
            raise ApiError(
                403,
                "Web pages of other sites may not send this: start the server with "
                f"--cors-origin {request.headers['Origin']} if this one may.",
                code="origin_not_allowed",
            )
    return await handler(request)


def _is_form(request: web.Request) -> bool:
    """Whether a page of another origin has sent what needs no preflight and is no mere question."""
    origin = request.headers.get("Origin")
    if origin is None or request.method != "POST" or request.content_type == "application/json":
        return False
    if request.headers.get("Sec-Fetch-Site") == "same-origin":
        return False
    return origin.partition("://")[2] != request.headers.get("Host")


def _names_this_machine(host: str, allowed: list[str]) -> bool:
    name = _hostname(host)
    # Nobody outside can make these lead anywhere. Docker calls the host host.docker.internal.
    if "." not in name or name.endswith(_LOCAL_DOMAINS) or name in {each.lower() for each in allowed}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hostname(host: str) -> str:
    """The name in a Host header, without the port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach what is bound to an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


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
