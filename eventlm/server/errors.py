"""Errors as clients get them: in OpenAI's envelope, or in the form of the API that was called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import structlog
from aiohttp import web

from eventlm.engine.admin import AmbiguousRequestError, RestartError
from eventlm.engine.backend import BackendFailure
from eventlm.engine.object_store.actions import ObjectStoreError
from eventlm.engine.rate_limits import RateLimitError, RateLimitState
from eventlm.engine.request import (
    BY_OPERATOR,
    BY_OWNER,
    LOGITS_NOT_FINITE,
    ContextLengthError,
    EngineUnavailableError,
    GroupSizeError,
    KeyReusedError,
    QueueFullError,
    TokenIdError,
)
from eventlm.errors import EventLMError, InputError, PromptTooLongError, UnknownModelError
from eventlm.formatting import sentence
from eventlm.text.choice_output import GenerationError
from eventlm.text.output_queue import TakenOverError
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND, ceil_div

_log = structlog.get_logger("eventlm.server")

#: Seconds after which a client should try again. A full queue empties in steps; a start or a restart takes longer.
QUEUE_RETRY_SECONDS = 1
UNAVAILABLE_RETRY_SECONDS = 5
#: The status of a request that its client has ended, as in nginx's logs and Google's APIs.
CANCELLED = 499
IDEMPOTENCY_HEADER = "Idempotency-Key"
#: The code for a reader whose stream another one has taken over.
TAKEN_OVER = "taken_over"


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
    """An error with its HTTP status.

    `retry_after` is in seconds; `should_retry` False is for statuses that clients would retry otherwise.
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
        """OpenAI's envelope as a body."""
        return msgspec.json.encode(self.envelope)

    def to_response(self, form: ErrorForm | None = None, request_id: str = "") -> web.Response:
        """The error as a whole reply, in OpenAI's envelope or another form."""
        body = self.to_json() if form is None else msgspec.json.encode(form.make(self, request_id))
        return web.Response(status=self.status, body=body, content_type="application/json", headers=self.headers)


class ErrorForm(NamedTuple):
    """The form that an API has for errors. make: from an error and the request's id to a struct of type `envelope`."""

    envelope: Any
    make: Callable[[ApiError, str], Any]


#: The forms other than OpenAI's, by the beginning of the paths that have them.
ERROR_FORMS = web.AppKey("error_forms", dict[str, ErrorForm])


def error_form(forms: dict[str, ErrorForm], path: str) -> ErrorForm | None:
    """The form of the errors of a path; None: OpenAI's."""
    return next((form for prefix, form in forms.items() if path.startswith(prefix)), None)


def from_input_error(error: InputError) -> ApiError:
    """400: a value in the request is wrong; 404 for a model that is not served."""
    status = 404 if isinstance(error, UnknownModelError) else 400
    return ApiError(status, str(error), param=error.param, code=error.code)


def stream_rewound(num_outputs: int) -> ApiError:
    """The error for a client that is ahead of a stream which has lost outputs. num_outputs: how many are left."""
    message = (
        f"The stream has lost outputs after number {num_outputs}, and may go on differently: drop what came after the "
        f"last event whose id is at most {num_outputs}, and resume from that event."
    )
    headers = {"x-resume-from": str(num_outputs)}
    return ApiError(409, message, code="stream_rewound", should_retry=False, headers=headers)


def reply_not_found(reply_id: str) -> ApiError:
    """404: no such reply, no longer kept, or another owner's."""
    return ApiError(404, f"No reply has the id '{reply_id}', or it cannot be resumed any longer.")


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


def internal_error() -> ApiError:
    """500 without details, which the log has under the request's id."""
    return ApiError(500, "The server failed while it handled this request.", type="server_error", should_retry=False)


class _HttpCase(NamedTuple):
    message: str
    code: str | None


_HTTP_CASES = {
    404: _HttpCase("Invalid URL ({method} {path})", "unknown_url"),
    405: _HttpCase("Not allowed to {method} on {path}", "method_not_supported"),
}


def from_http_exception(error: web.HTTPException, *, method: str, path: str, why: str = "") -> ApiError:
    """The envelope for an error that aiohttp raised itself, such as a path or a method that no route has.

    why: a clause that says why this server does not have it, if that is known.
    """
    case = _HTTP_CASES.get(error.status, _HttpCase(error.reason, None))
    if why and error.status in _HTTP_CASES:
        case = _HttpCase(f"{{method}} {{path}} is not supported: {why}.", "not_supported")
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return ApiError(
        error.status,
        case.message.format(method=method, path=path),
        type=kind,
        code=case.code,
        headers=headers,
    )


def api_error(error: Exception, *, prompt_param: str = "prompt") -> ApiError:
    """The envelope for an error of a request or of the engine; a 500 for anything else.

    prompt_param: the field that has the prompt.
    """
    match error:
        case ApiError():
            return error
        case InputError():
            return from_input_error(error)
        case GenerationError():
            return from_generation_error(error)
        case TokenIdError() | GroupSizeError():
            return from_input_error(InputError(prompt_param, f"Invalid value for '{prompt_param}': {error}."))
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
                # Waiting does not help if the limit never allows it.
                retry_after=ceil_div(error.retry_ns, 1_000_000_000) or None,
                should_retry=error.retry_ns > 0,
                headers=rate_limit_headers(error.state),
            )
        case ContextLengthError():
            return from_input_error(PromptTooLongError(prompt_param, str(error)))
        case AmbiguousRequestError():
            return ApiError(409, sentence(str(error)), param="id", code="ambiguous_request", should_retry=False)
        case KeyReusedError():
            return ApiError(
                422,
                f"The {IDEMPOTENCY_HEADER} was used for another request: send the same body to the same path, or a new "
                "key.",
                param=IDEMPOTENCY_HEADER,
                code="idempotency_key_reused",
            )
        case RestartError():
            return ApiError(409, f"Not restarted: {error}.", code="not_restarted", should_retry=False)
        case TakenOverError():
            message = "This stream is continued on another connection."
            return ApiError(409, message, code=TAKEN_OVER, should_retry=False)
        case ObjectStoreError():
            return unavailable(sentence(str(error)))
        case EngineUnavailableError():
            return unavailable(sentence(str(error) or "the engine cannot take requests at the moment"))
        case _:
            _log.error("a request failed", exc_info=error)
            return internal_error()


def from_generation_error(error: GenerationError) -> ApiError:
    """The envelope for a sequence that ended before its output was complete."""
    message = str(error)
    if error.failure is not None:
        return _from_failure(message, error.failure)
    match error.reason:
        case "cancelled" if error.detail == BY_OWNER:
            return ApiError(CANCELLED, message, code="cancelled", should_retry=False)
        case "cancelled" if error.detail == BY_OPERATOR:
            # An operator would have to end a second attempt as well.
            return unavailable(message, code="aborted", should_retry=False)
        case "deadline":
            # A second attempt would run into the same deadline.
            return ApiError(504, message, type="server_error", code="deadline_exceeded", should_retry=False)
        case "error" if error.detail and error.detail != LOGITS_NOT_FINITE:
            return from_input_error(InputError(None, message))
        case "error":
            # A second attempt would fail in the same way.
            return ApiError(500, message, type="server_error", should_retry=False)
        case _:
            return unavailable(message)


def _from_failure(message: str, failure: BackendFailure) -> ApiError:
    """The envelope for a request that its backends have failed: their own error if it is about the request."""
    if failure.kind == "refused":
        return ApiError(
            failure.status or 400, message, param=failure.param or None, code=failure.code or None, should_retry=False
        )
    if failure.kind == "overloaded":
        retry_after = ceil_div(failure.retry_after_ns, NANOSECONDS_PER_SECOND) or QUEUE_RETRY_SECONDS
        return ApiError(503, message, type="server_error", code="backend_overloaded", retry_after=retry_after)
    status = 504 if failure.kind == "timeout" else 502
    return ApiError(status, message, type="server_error", code=f"backend_{failure.kind}")


def rate_limit_headers(state: RateLimitState) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, for the limits that are set."""
    headers = {}
    for kind, bucket in (("requests", state.requests), ("tokens", state.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = format_duration(bucket.reset_ns)
    return headers


def format_duration(duration_ns: int) -> str:
    """As OpenAI writes it: `120ms`, `1s`, `1.5s`, `6m0s`; rounded up to a millisecond, never down to 0."""
    total_ms = ceil_div(duration_ns, NANOSECONDS_PER_MILLISECOND)
    if total_ms < 1000:
        return f"{total_ms}ms" if total_ms else "0s"
    minutes, rest_ms = divmod(total_ms, 60_000)
    seconds = f"{rest_ms // 1000}.{rest_ms % 1000:03d}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{seconds}" if minutes else seconds
