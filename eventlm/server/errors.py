"""What a client is told when something goes wrong: OpenAI's error envelope, on every error without exception."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from aiohttp import web

from eventlm.engine.admin import AmbiguousRequestError
from eventlm.engine.rate_limits import RateLimitError
from eventlm.engine.request import (
    BY_OPERATOR,
    BY_OWNER,
    ContextLengthError,
    EngineUnavailableError,
    GroupSizeError,
    QueueFullError,
    TokenIdError,
)
from eventlm.errors import EventLMError
from eventlm.formatting import sentence
from eventlm.server.auth.rate_limit_headers import rate_limit_headers
from eventlm.types import FinishReason, ceil_div

#: Seconds after which a client should try again: a full queue empties in steps, a start or a restart takes longer.
QUEUE_RETRY_SECONDS = 1
UNAVAILABLE_RETRY_SECONDS = 5
#: The status of a request that its client has ended, which nobody failed; servers log it, and Google's APIs send it.
CANCELLED = 499


class ErrorBody(msgspec.Struct, frozen=True):
    """The inside of the envelope. `code` is a string or null, never a number."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """`{"error": {...}}`."""

    error: ErrorBody


class ApiError(EventLMError):
    """An error with its place in the table of HTTP errors.

    `retry_after` is in seconds; `should_retry` False tells clients that would retry this status not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        should_retry: bool = True,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.envelope = ErrorEnvelope(ErrorBody(message=message, type=type, param=param, code=code))
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)
        if not should_retry:
            self.headers["x-should-retry"] = "false"

    def to_json(self) -> bytes:
        """The envelope as the body of a reply or of a stream's `data:` line."""
        return msgspec.json.encode(self.envelope)

    def to_response(self) -> web.Response:
        """The reply of a request that has not been answered yet."""
        return web.Response(
            status=self.status, body=self.to_json(), content_type="application/json", headers=self.headers
        )


def invalid_json(detail: str) -> ApiError:
    """400: the body is not JSON."""
    return ApiError(400, f"The request body is not valid JSON: {detail}")


def invalid_type(param: str | None, message: str) -> ApiError:
    """400: a field has the wrong type."""
    return ApiError(400, message, param=param, code="invalid_type")


def invalid_value(param: str | None, message: str) -> ApiError:
    """400: a field is out of range, or not one of the values that it can have."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing_parameter(param: str) -> ApiError:
    """400: a required field is absent. The code is OpenAI's."""
    return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def context_length_exceeded(message: str, param: str) -> ApiError:
    """400: prompt and max_tokens do not fit in the context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def model_not_found(model: str) -> ApiError:
    """404: no such model."""
    return ApiError(
        404,
        f"The model '{model}' does not exist; GET /v1/models lists those that do.",
        param="model",
        code="model_not_found",
    )


def reply_not_found(reply_id: str) -> ApiError:
    """404: no such reply, not any more, or somebody else's."""
    return ApiError(404, f"There is no reply with the id '{reply_id}', or it cannot be resumed, or not any more.")


def ambiguous_request(error: AmbiguousRequestError) -> ApiError:
    """409: several replies go by the id; the message names them."""
    return ApiError(409, sentence(str(error)), param="id", code="ambiguous_request", should_retry=False)


def taken_over() -> ApiError:
    """409: the stream goes on elsewhere."""
    return ApiError(409, "This stream is continued on another connection.", code="taken_over", should_retry=False)


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body is over the configured limit."""
    return ApiError(413, f"The request body is larger than the limit of {limit_bytes} bytes.")


def timed_out(message: str) -> ApiError:
    """408: the client took too long to send its request."""
    return ApiError(408, message)


def unavailable(message: str, *, code: str | None = None, should_retry: bool = True) -> ApiError:
    """503: loading, draining or dead, or ended by an operator."""
    return ApiError(
        503,
        message,
        type="server_error",
        code=code,
        retry_after=UNAVAILABLE_RETRY_SECONDS,
        should_retry=should_retry,
    )


def cancelled() -> ApiError:
    """499: the request's owner has ended it, and nobody has failed."""
    return ApiError(CANCELLED, "This request was cancelled by its owner.", code="cancelled", should_retry=False)


def internal_error() -> ApiError:
    """500 without details; those are in the server's log under the request's id."""
    return ApiError(500, "The server failed while it handled this request.", type="server_error", should_retry=False)


class _HttpCase(NamedTuple):
    message: str
    code: str | None


_HTTP_CASES = {
    404: _HttpCase("Invalid URL ({method} {path})", "unknown_url"),
    405: _HttpCase("Not allowed to {method} on {path}", "method_not_supported"),
}


def from_http_exception(error: web.HTTPException, *, method: str, path: str) -> ApiError:
    """The envelope for an error that aiohttp raised itself, such as a path or a method that no route has."""
    case = _HTTP_CASES.get(error.status, _HttpCase(error.reason, None))
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return ApiError(
        error.status,
        case.message.format(method=method, path=path),
        type=kind,
        code=case.code,
        headers=headers,
    )


def from_engine_error(error: EventLMError, *, prompt_param: str) -> ApiError:
    """The envelope for what `InferenceEngine.submit` or a request's handle raised."""
    match error:
        case ApiError():
            return error
        case TokenIdError() | GroupSizeError():
            return invalid_value(prompt_param, f"Invalid value for '{prompt_param}': {error}.")
        case QueueFullError():
            return ApiError(
                429, sentence(str(error)), type="requests", code="rate_limit_exceeded", retry_after=QUEUE_RETRY_SECONDS
            )
        case RateLimitError():
            return ApiError(
                429,
                str(error),
                type=error.kind,
                code="rate_limit_exceeded",
                # To wait is no use for what the limit never allows.
                retry_after=ceil_div(error.retry_ns, 1_000_000_000) or None,
                should_retry=error.retry_ns > 0,
                headers=rate_limit_headers(error.state),
            )
        case ContextLengthError():
            return context_length_exceeded(str(error), prompt_param)
        case EngineUnavailableError():
            return unavailable(sentence(str(error) or "the engine cannot take requests at the moment"))
        case _:
            return internal_error()


def from_finish_reason(reason: FinishReason, detail: str = "") -> ApiError | None:
    """The error that a sequence's end means for its client, None for an ordinary end.

    detail: as in `FinishedOutput`.
    """
    match reason:
        case "cancelled" if detail == BY_OWNER:
            return cancelled()
        case "cancelled" if detail == BY_OPERATOR:
            # It was ended on purpose: what comes again would have to be ended again.
            return unavailable("An operator ended this request.", code="aborted", should_retry=False)
        case "cancelled" | "front_end_lost":
            return unavailable("The server ended this request before it was complete.")
        case "deadline":
            return ApiError(
                504,
                "The request's deadline cannot be met.",
                type="server_error",
                code="deadline_exceeded",
                # The same again would run into the same deadline, and its answer would be late for who waits.
                should_retry=False,
            )
        case "error" if detail:
            return invalid_value(None, f"The model cannot follow the structure that was asked for: {detail}.")
        case "error":
            return internal_error()
        case _:
            return None
