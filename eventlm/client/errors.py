"""What can go wrong between a client and a server, in one line each."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp
import msgspec

from eventlm.errors import EventLMError

#: `connection`: no answer. `timeout`: the server fell silent. `http`: an error status. `server`: an error within
#: a stream. `broken`: a reply ended too early. `protocol`: this is not the reply of an OpenAI-compatible server.
ErrorKind = Literal["connection", "timeout", "http", "server", "broken", "protocol"]

_MAX_MESSAGE_CHARACTERS = 500


class ClientError(EventLMError):
    """A request failed. `status` is the HTTP status if there was one that said so, else None.

    `retry_after_s`: how long the server wants a client to wait before it tries again; None where it does not say.
    """

    def __init__(
        self, message: str, kind: ErrorKind, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after_s = retry_after_s


def from_status(
    url: str, status: int, reason: str | None, body: bytes, headers: Mapping[str, str], *, has_key: bool
) -> ClientError:
    """The error for a reply with an error status; `reason` is the status in words. `has_key`: a key was sent."""
    message = server_message(body)
    if status == 404 and message is None:
        return ClientError(
            f"{url} does not exist there (HTTP 404); is it the address of an OpenAI-compatible server?",
            "protocol",
            status=status,
        )
    if message is None:
        message = reason or "without a reason"
    if status == 401:
        remedy = "is the API key right?" if has_key else "give an API key in EVENTLM_API_KEY or with --api-key KEY"
        message = f"{message.rstrip('.')}; {remedy}"
    return ClientError(
        f"{url} answered HTTP {status}: {message}", "http", status=status, retry_after_s=retry_after_seconds(headers)
    )


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """The reply's `Retry-After`, in seconds or as a date; None if there is none that makes sense.

    A date counts from the reply's own `Date`: the clocks of two hosts may differ.
    """
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            until, now = parsedate_to_datetime(text), parsedate_to_datetime(headers.get("Date", ""))
            seconds = (until - now).total_seconds()
        except (ValueError, TypeError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def from_transport(url: str, error: BaseException, *, timeout_seconds: float) -> ClientError:
    """The error for what aiohttp or the system raised."""
    kind: ErrorKind
    match error:
        case aiohttp.ConnectionTimeoutError():
            kind, what = "timeout", f"{url} cannot be reached within {timeout_seconds:g} s"
        case TimeoutError():
            kind, what = "timeout", f"{url} sent nothing for {timeout_seconds:g} s"
        case aiohttp.ClientConnectorCertificateError():
            kind, what = "connection", f"{url} shows a certificate that is not trusted ({error.certificate_error})"
            what += "; if it is your own, name its file in SSL_CERT_FILE"
        case aiohttp.ClientConnectorSSLError():
            kind, what = "connection", f"{url} does not speak TLS ({error.os_error}); is its address an http: one?"
        case aiohttp.ClientConnectorError():
            kind, what = "connection", f"cannot connect to {url}: {_reason(error.os_error)}; is the server running?"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            kind, what = "broken", f"{url} closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            kind, what = "broken", f"{url} broke off in the middle of its reply"
        case aiohttp.TooManyRedirects():
            kind, what = "protocol", f"{url} redirects in a circle; is it the address of an OpenAI-compatible server?"
        case aiohttp.ClientResponseError():
            kind, what = "protocol", f"{url} does not speak HTTP: {error.message or error}"
        case _:
            kind, what = "connection", f"the request to {url} failed: {error}"
    return ClientError(what, kind)


def server_message(body: bytes) -> str | None:
    """The server's own message, in one line; None if there is none for people."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body.decode(errors="replace")
        return _one_line(text) if text.strip() and "<" not in text[:100] else None
    return message_of(value)


def message_of(value: Any) -> str | None:
    """The message in a decoded error: OpenAI's envelope, its inside, a plain string, or FastAPI's `detail`."""
    if isinstance(value, str):
        return _one_line(value) if value.strip() else None
    if not isinstance(value, dict):
        return None
    for name in ("error", "message", "detail"):
        if value.get(name) is not None:
            found = value[name]
            return message_of(found) or _one_line(msgspec.json.encode(found).decode())
    return None


def _reason(error: OSError) -> str:
    # asyncio puts words of its own in the place of the system's; errors of name resolution have no number of its.
    number = error.errno or 0
    return os.strerror(number) if number in errno.errorcode else error.strerror or str(error)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else line[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
