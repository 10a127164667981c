"""What goes wrong between this server and a backend, in one line each and without the backend's key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from eventlm.client import errors
from eventlm.client.errors import ErrorKind, message_of, retry_after_seconds, server_message
from eventlm.engine.backend import BackendError
from eventlm.events.forwarding import FailureKind
from eventlm.types import NANOSECONDS_PER_SECOND

_KINDS: dict[ErrorKind, FailureKind] = {
    "connection": "connect",
    "timeout": "timeout",
    "http": "server",
    "server": "server",
    "broken": "broken",
    "protocol": "protocol",
}
#: Statuses of a backend that takes no more at present. 425: it has just started.
_OVERLOADED = (425, 429, 503)
#: Whoever says more means never.
_MOST_RETRY_AFTER_SECONDS = 86_400
#: Statuses that say nothing about the request: the backend was too slow or in between, or wants another key.
_OF_BACKEND = (401, 402, 403, 407, 408, 409)
#: `501`: a function that was not turned on.
_REFUSED_FROM_500 = (501,)


class _Error(Struct, frozen=True):
    """An error in OpenAI's form. Some servers have a number for its code."""

    message: Any = None
    param: Any = None
    code: Any = None


class _Envelope(Struct, frozen=True):
    error: _Error | None = None
    #: vLLM and SGLang had the inside alone.
    param: Any = None
    code: Any = None


def from_transport(url: str, error: BaseException, *, seconds: float) -> BackendError:
    """The error for what aiohttp or the system raised. seconds: how long was waited."""
    found = errors.from_transport(url, error, timeout_seconds=seconds)
    match error:
        case aiohttp.ClientConnectorCertificateError():
            message = (
                f"{url} shows a certificate that is not trusted ({error.certificate_error}); if it is your own, name "
                "its file with ca_file=FILE"
            )
            return BackendError(message, "connect")
        case aiohttp.ConnectionTimeoutError():
            return BackendError(str(found), "connect")
        case TimeoutError() | aiohttp.ClientConnectorError():
            pass
        case aiohttp.ClientConnectionError():
            # There was a connection.
            return BackendError(str(found), "broken")
    return BackendError(str(found), _KINDS[found.kind])


def from_status(
    url: str, status: int, reason: str | None, body: bytes, headers: Mapping[str, str], *, key: str
) -> BackendError:
    """The error for a reply with an error status; `reason` is the status in words. key: the one that was sent."""
    message = without_key(server_message(body) or "", key)
    param, code = _param_and_code(body)
    kind = _kind_of(status, param, code)
    retry_after = retry_after_seconds(headers)
    if status == 401:
        remedy = "is its key right?" if key else "give its key with key=KEY"
        line = f"{url} wants another key (HTTP 401{': ' + message.rstrip('.') if message else ''}); {remedy}"
    elif 300 <= status < 400:
        kind = "protocol"
        line = f"{url} redirects to {headers.get('Location', 'another address')}; give that address"
    elif kind == "refused":
        # The client reads it.
        line = message or f"The model's server does not take this request (HTTP {status})."
    else:
        line = f"{url} answered HTTP {status}: {message or reason or 'without a reason'}"
    return BackendError(
        line,
        kind,
        status=status,
        retry_after_ns=round(min(retry_after or 0.0, _MOST_RETRY_AFTER_SECONDS) * NANOSECONDS_PER_SECOND),
        param=param,
        code=code,
    )


def from_event(url: str, error: Any, *, key: str) -> BackendError:
    """The error for an `error` within a stream. A status among its fields counts as if it had come as one."""
    message = without_key(message_of(error) or msgspec.json.encode(error).decode(), key)
    found = error if isinstance(error, dict) else {}
    code, param = found.get("code"), _text(found.get("param"))
    status = code if isinstance(code, int) and 400 <= code < 600 else 0
    kind = _kind_of(status, param, _text(code)) if status else "server"
    line = message if kind == "refused" else f"{url} failed: {message}"
    return BackendError(line, kind, status=status, param=param, code=_text(code))


def without_key(message: str, key: str) -> str:
    """A backend's message, which may repeat what it was sent."""
    return message.replace(key, "***") if key else message


def _kind_of(status: int, param: str, code: str) -> FailureKind:
    if status in _OVERLOADED:
        return "overloaded"
    # The name of the model is the operator's, not the client's.
    is_of_model = status == 404 and (param == "model" or code == "model_not_found")
    if status in _OF_BACKEND or is_of_model or (status >= 500 and status not in _REFUSED_FROM_500):
        return "server"
    return "refused"


def _param_and_code(body: bytes) -> tuple[str, str]:
    try:
        envelope = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", ""
    inside = envelope.error or envelope
    return _text(inside.param), _text(inside.code)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
