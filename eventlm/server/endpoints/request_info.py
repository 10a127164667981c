"""`GET /v1/requests/{id}` and `GET /v1/requests/{id}/explain`: where a request is, and where its time went.

The id is the reply's (`chatcmpl-...`) or its `x-request-id`. Only the request's own key finds it.
"""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from msgspec import Raw, Struct

from eventlm.engine.explanations import NotExplainedError
from eventlm.engine.request import UnknownReplyError
from eventlm.engine.request_registry import ReplyStatus, SampleState
from eventlm.errors import InputError
from eventlm.formatting import sentence
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.endpoints.openapi import JSON, Endpoint, Parameter
from eventlm.server.errors import ApiError, internal_error
from eventlm.server.timings import ChoiceTimings, choice_timings
from eventlm.types import FinishReason

#: Seconds after which to try again if too many explanations are under way.
_RETRY_SECONDS = 5


class ChoiceState(Struct, frozen=True, kw_only=True):
    """A choice. Once it is over it has its `finish_reason`, as the log has it (such as eos, length, cancelled), and its
    `timings`, for as long as they are kept. A choice of a beam search has only its `state`, which is the search's.
    """

    index: int
    state: SampleState
    finish_reason: FinishReason | None
    output_tokens: int | None
    timings: ChoiceTimings | None


class RequestInfo(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/requests/{id}`. `id` is the reply's; `branches` is how many requests a beam search has added."""

    id: str
    object: str = "eventlm.request"
    state: SampleState
    choices: list[ChoiceState]
    branches: int = 0


class ExplainReply(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/requests/{id}/explain`: as `eventlm explain --json` has it, one for each choice."""

    id: str
    object: str = "eventlm.explanation"
    explanations: list[Raw]
    warnings: list[str]


async def request_info(request: web.Request) -> web.Response:
    """Where a request is: waiting, running, preempted, ending or finished; and where its time went if it is over."""
    return _info(await _status(request, request[PRINCIPAL].owner))


async def any_request_info(request: web.Request) -> web.Response:
    """The same of any key's request, for operators; also by the seq of its arrival in the trace.

    A 409 if several have the same `x-request-id`; it names their replies.
    """
    return _info(await _status(request, None))


def _info(status: ReplyStatus) -> web.Response:
    choices = [
        ChoiceState(
            index=choice,
            state=sample.state,
            finish_reason=sample.row.reason if sample.row is not None and sample.row.reason != "unfinished" else None,
            output_tokens=sample.output_tokens,
            timings=choice_timings(choice, sample.row) if sample.row is not None else None,
        )
        for choice, sample in enumerate(status.samples)
    ]
    # The state of an unfinished choice tells most.
    unfinished = [choice.state for choice in choices if choice.state != "finished"]
    state = unfinished[0] if unfinished else "finished"
    return json_response(RequestInfo(id=status.reply_id, state=state, choices=choices, branches=status.num_branches))


async def explain_request(request: web.Request) -> web.Response:
    """Where the time of a request went, interval by interval with its cause; so far, if it is not over.

    The run's trace is replayed for it, from the newest file that begins before the request.
    """
    is_text = _asks_for_text(request)
    status = await _status(request, request[PRINCIPAL].owner)
    engine, owner = request.app[CONTEXT].engine, request[PRINCIPAL].owner
    try:
        answer = await engine.explain(status.reply_id, owner)
    except NotExplainedError as error:
        raise _not_explained(error) from error
    except UnknownReplyError as error:
        raise _not_found(request) from error
    if is_text:
        return web.Response(text=answer.text, content_type="text/plain")
    return json_response(
        ExplainReply(
            id=status.reply_id,
            explanations=[Raw(each.encode()) for each in answer.explanations],
            warnings=answer.warnings,
        )
    )


def _asks_for_text(request: web.Request) -> bool:
    form = request.query.get("format", "json")
    if form in ("json", "text"):
        return form == "text"
    raise InputError("format", "Invalid value for 'format': supported values are 'json' and 'text'.")


async def _status(request: web.Request, owner: str | None) -> ReplyStatus:
    """owner: None for any. Raises ApiError (404) for an unknown request, or one of another owner."""
    try:
        return await request.app[CONTEXT].engine.status(request.match_info["id"], owner)
    except UnknownReplyError as error:
        raise _not_found(request) from error


def _not_found(request: web.Request) -> ApiError:
    return ApiError(
        404,
        f"There is no request with the id '{request.match_info['id']}', or not any more: the id is that of the reply, "
        "or of its x-request-id.",
        param="id",
        code="request_not_found",
    )


def _not_explained(error: NotExplainedError) -> ApiError:
    match error.reason:
        case "too_many":
            return ApiError(
                429, sentence(str(error)), type="requests", code="rate_limit_exceeded", retry_after=_RETRY_SECONDS
            )
        case "too_long":
            return ApiError(
                503,
                sentence(str(error)),
                type="server_error",
                code="explanation_too_long",
                retry_after=60,
                should_retry=False,
            )
        case "not_recorded" | "not_kept":
            return ApiError(409, sentence(str(error)), param="id", code=error.reason, should_retry=False)
        case "failed":
            return internal_error()


REQUEST_ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/requests/{id:.+}/explain",
        explain_request,
        reply=ExplainReply,
        media_types=(JSON, "text/plain"),
        parameters=(Parameter("format", "query", Literal["json", "text"], "What the explanation comes as."),),
        errors=(409, 429, 503),
    ),
    Endpoint("GET", "/v1/requests/{id:.+}", request_info, reply=RequestInfo, errors=(503,)),
)
