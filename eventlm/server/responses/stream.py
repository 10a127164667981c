"""Responses as they are sent: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from eventlm.engine.request import Request
from eventlm.server.errors import CANCELLED, TAKEN_OVER, ApiError
from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.reply_format import NAMED_EVENTS, ReplyIdentity, StreamFormat
from eventlm.server.responses.events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseErrorEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from eventlm.server.responses.logprobs import TokenTexts, token_logprobs
from eventlm.server.responses.output import ResponseOutput
from eventlm.server.responses.protocol import ConversationRef, ReasoningConfig, ResponsesRequest, TextConfig, TextFormat
from eventlm.server.responses.replies import IncompleteDetails, Response, ResponseError, ResponseUsage
from eventlm.server.timings import timings
from eventlm.text.choice_output import ChoiceOutput, api_finish_reason
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import NO_FORMATS, Formats
from eventlm.text.tools.message import MessageParser, MessagePart, message_format
from eventlm.text.tools.parser_events import Content
from eventlm.types import NANOSECONDS_PER_SECOND


class ResponseReplies(StreamFormat):
    """The response to one request. response: as it is, with its output once it has ended."""

    prompt_param = "input"
    framing = NAMED_EVENTS

    def __init__(
        self,
        body: ResponsesRequest,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        formats: Formats = NO_FORMATS,
    ) -> None:
        super().__init__(tokenizer, identity)
        [request] = group
        format = message_format(request)
        self._is_forwarded = request.forwarded is not None
        self._parser = None if format.is_plain and not self._is_forwarded else MessageParser(format, formats)
        self._wants_logprobs = body.wants_logprobs
        #: Needed where not all text is the message's.
        self._tokens = TokenTexts(tokenizer, request)
        #: Of tokens whose text is held back, where all of it is.
        self._logprobs: list[TokenLogprob] = []
        self._includes_timings = body.wants_timings
        self._output = ResponseOutput(identity.reply_id)
        self._is_cut = False
        self.response = begun_response(body, request, identity)
        self._is_queued = self.response.status == "queued"

    def begin(self, generation: Generation) -> Sequence[Any]:
        number = self._output.number
        event = ResponseQueued if self._is_queued else ResponseInProgress
        return [ResponseCreated(number(), self.response), event(number(), self.response)]

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        events = self._go_on() if self._is_queued else []
        if self._parser is None:
            events += self._plain(output)
        elif self._is_forwarded:
            events += self._found(output, self._parser)
        elif self._wants_logprobs:
            events += self._with_logprobs(output, self._parser)
        else:
            events += [event for part in self._parser.parts(output.text) for event in self._output.add(part)]
        if output.finished is not None:
            events += self._close(output)
        return events

    def _go_on(self) -> list[Any]:
        """The event that tells that a response is no longer queued."""
        self._is_queued = False
        self.response = structs.replace(self.response, status="in_progress")
        return [ResponseInProgress(self._output.number(), self.response)]

    def end(self, generation: Generation) -> Sequence[Any]:
        response = self._end(generation)
        event = ResponseIncomplete if response.status == "incomplete" else ResponseCompleted
        if self._includes_timings:
            response = structs.replace(response, eventlm=timings(generation.rows))
        return [event(self._output.number(), response)]

    def failure(self, error: ApiError) -> Sequence[Any]:
        body, number = error.envelope.error, self._output.number
        if body.code == TAKEN_OVER:
            # Only this stream has ended: its client goes on after the last event that it got, whose number this has.
            return [ResponseErrorEvent(self._output.num_events - 1, body.code, body.message, body.param)]
        events = self._output.end_item("incomplete")
        is_cancelled = error.status == CANCELLED
        self.response = structs.replace(
            self.response,
            status="cancelled" if is_cancelled else "failed",
            completed_at=None,
            error=None if is_cancelled else ResponseError(_code(error), body.message),
            output=self._output.items,
        )
        events.append(ResponseErrorEvent(number(), body.code, body.message, body.param))
        events.append(ResponseFailed(number(), self.response))
        return events

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Response:
        [output] = choices
        self.events(output, generation)
        return self._end(generation)

    def _plain(self, output: ChoiceOutput) -> list[Any]:
        """All text is the message's."""
        if self._wants_logprobs:
            self._logprobs += token_logprobs(self._tokenizer, output)
        if not output.text:
            return []
        logprobs = self._logprobs
        if logprobs:
            self._logprobs = []
        return self._output.add(Content(output.text), logprobs)

    def _found(self, output: ChoiceOutput, parser: MessageParser) -> list[Any]:
        """What a backend has found. All its log-probabilities are taken for those of the message."""
        logprobs = token_logprobs(self._tokenizer, output) if self._wants_logprobs else []
        return [
            event
            for part in parser.take(output)
            for event in self._output.add(part, logprobs if isinstance(part, Content) else [])
        ]

    def _with_logprobs(self, output: ChoiceOutput, parser: MessageParser) -> list[Any]:
        events: list[Any] = []
        for text in self._tokens.pieces(output):
            events += self._add_with_logprobs(parser.parts(text))
        return events

    def _add_with_logprobs(self, parts: list[MessagePart]) -> list[Any]:
        """Parts that end where the last piece of the text does."""
        events: list[Any] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._output.add(part, self._tokens.of_content(len(part.text)))
            else:
                self._tokens.skip()
                events += self._output.add(part)
        return events

    def _close(self, output: ChoiceOutput) -> list[Any]:
        """The rest, after the last text."""
        assert output.finished is not None
        self._is_cut = api_finish_reason(output.finished.reason) == "length"
        events, rest = [], self._logprobs
        if self._parser is not None:
            events = self._add_with_logprobs(self._parser.last_parts())
            rest = self._tokens.rest()
        return events + self._output.end("incomplete" if self._is_cut else "completed", rest)

    def _end(self, generation: Generation) -> Response:
        """The response that has ended."""
        row = generation.rows.get(0)
        seconds = row.request_e2e_time // NANOSECONDS_PER_SECOND if row is not None else 0
        self.response = structs.replace(
            self.response,
            status="incomplete" if self._is_cut else "completed",
            completed_at=None if self._is_cut else self.identity.created + seconds,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            output=self._output.items,
            usage=ResponseUsage.of(generation.token_counts()),
        )
        return self.response


def begun_response(body: ResponsesRequest, request: Request, identity: ReplyIdentity) -> Response:
    """A response without output."""
    conversation = body.conversation_id
    text = body.text or TextConfig()
    return Response(
        id=identity.reply_id,
        created_at=identity.created,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        conversation=None if conversation is None else ConversationRef(conversation),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or ReasoningConfig(),
        safety_identifier=body.safety_identifier,
        service_tier=body.used_tier,
        store=body.store is not False,
        temperature=request.sampling.temperature,
        text=structs.replace(text, format=text.format or TextFormat("text")),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=request.sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _code(error: ApiError) -> str:
    """The one of OpenAI's codes for failed responses that comes next to an error."""
    if error.envelope.error.code == "rate_limit_exceeded":
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status == 400 else "server_error"
