"""Anthropic's form of errors, and its headers."""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from eventlm.server.errors import ApiError, ErrorForm

MESSAGES_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Codes for parameters: on this one, clients go on without threads.
_CODES: dict[str | None, str] = {"thread": "thread_unsupported_request"}
#: The headers of rate limits, and Anthropic's names for them.
_HEADERS = {
    f"x-ratelimit-{figure}-{kind}": f"anthropic-ratelimit-{kind}-{figure}"
    for kind in ("requests", "tokens")
    for figure in ("limit", "remaining")
}


class ErrorDetails(Struct, frozen=True):
    """The cause, for programs. The codes are those of OpenAI's form, where Anthropic has none."""

    error_code: str


class ErrorDetail(Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class ErrorReply(Struct, frozen=True, tag="error"):
    """`{"type": "error", "error": {...}, "request_id": ...}`; in a stream without the id, which is in the headers."""

    error: ErrorDetail
    request_id: str | UnsetType = UNSET


def error_reply(error: ApiError, request_id: str = "") -> ErrorReply:
    """An error as Anthropic's clients get it."""
    type_ = _TYPES.get(error.status, "invalid_request_error" if 400 <= error.status < 499 else "api_error")
    body = error.envelope.error
    code = _CODES.get(body.param, body.code)
    details = UNSET if code is None else ErrorDetails(code)
    return ErrorReply(ErrorDetail(type_, body.message, details), request_id or UNSET)


MESSAGES_ERRORS = ErrorForm(ErrorReply, error_reply)


async def set_messages_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: add the names that Anthropic's clients know."""
    if request.path.startswith(MESSAGES_PATH):
        headers = response.headers
        headers["request-id"] = headers["x-request-id"]
        headers.update({own: headers[name] for name, own in _HEADERS.items() if name in headers})
