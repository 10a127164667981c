"""Who may use the page's server: programs of this machine that know its token.

The token is in the address behind `#`, which browsers do not send, and the page puts it into a header. So no other
page, whatever name leads it here, can ask for anything.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

_TOKEN_BYTES = 24
_NAMES = ("127.0.0.1", "localhost", "[::1]")


def new_token() -> str:
    """A random token, too long to guess."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def refuse(status: int, message: str) -> web.Response:
    """A refusal as JSON."""
    return web.json_response({"error": {"message": message}}, status=status, headers={"Cache-Control": "no-store"})


def guard(token: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware: the page's files for those who name this machine, its data for those who know the token."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if host.rsplit(":", 1)[0] not in _NAMES:
            return refuse(403, f"This page answers to this machine's own names only, not to {host!r}.")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            return refuse(403, "Pages of other sites may not ask this server.")
        if request.path.startswith("/api/"):
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, expected):
                return refuse(401, "The token is missing or wrong: open the address that `eventlm view` printed.")
        return await handler(request)

    return check
