"""The APIs that generate, and the way of a body through one.

Chats, completions, embeddings and the APIs of others are each an `Api`: bodies become requests, outputs become replies.
Everything between is shared, so limits, classes, deadlines, timings, explanations and resumption work alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from eventlm.engine.request import IdempotencyKey, Request, ResumedReply, Submission, UnknownReplyError
from eventlm.errors import InputError
from eventlm.server.auth.api_keys import Principal
from eventlm.server.context import ServerContext
from eventlm.server.errors import IDEMPOTENCY_HEADER
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity, StreamFormat
from eventlm.server.scheduling import scheduling_fields
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput, join_outputs
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import RequestFields

BodyT = TypeVar("BodyT", bound=RequestFields)


class Caller(NamedTuple):
    """Who sends a body. request_id: of the HTTP request. class_header, session_header: the service class and the
    session that its headers name. traceparent: the caller's span, if its header names one. idempotency_key: of the
    body, if its header names one.
    """

    principal: Principal
    request_id: str
    class_header: str = ""
    traceparent: str = ""
    session_header: str = ""
    idempotency_key: IdempotencyKey | None = None


class Prepared(NamedTuple):
    """The requests that a body makes, and what to echo of each."""

    group: Sequence[Request]
    echoes: Sequence[Echo] = ()


class Api(ABC, Generic[BodyT]):
    """One API. Those that are registered have no state."""

    #: How the ids of its replies begin. No registered API's prefix begins with another's.
    prefix: str
    #: The path by which lines of batches name it; empty if batches do not run it.
    path: str = ""
    #: Whether the events of its streams are numbered. Those that can be resumed have events for each output then, so
    #: that the numbers do not depend on how outputs were joined.
    numbers_events: bool = False
    #: Whether bodies may have any content type, except those of web pages: a page can send some without being asked
    #: whether it may.
    takes_any_type: bool = False
    #: Whether another model may answer a body too, without anybody noticing.
    has_shadows: bool = True

    @abstractmethod
    def decode(self, data: bytes) -> BodyT:
        """The body in a request's bytes. Raises InputError."""

    def decode_forwarded(self, data: bytes) -> BodyT:
        """The same of a body whose model other servers run, which may know more fields."""
        return self.decode(data)

    @abstractmethod
    async def make_requests(
        self, context: ServerContext, body: BodyT, caller: Caller, received_ns: int, scheduling: Mapping[str, Any]
    ) -> Prepared:
        """The requests of a body that came at `received_ns` of the engine's clock. Raises InputError or ApiError.

        scheduling: the fields of `SchedulingParams` that are decided already.
        """

    @abstractmethod
    def reply_format(
        self,
        context: ServerContext,
        body: BodyT,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        """The format of the replies to a body; the same again for the same arguments."""

    def without_generation(self, context: ServerContext, body: BodyT) -> Any | None:
        """The reply to a body that asks for no generation; None if it asks for one. Raises InputError."""
        return None

    def wants_stream(self, body: BodyT) -> bool:
        """Whether the body asks for a stream. Only those of a `StreamFormat` get one."""
        return bool(getattr(body, "stream", False))

    def runs_on(self, body: BodyT) -> bool:
        """Whether a reply goes on to its end without its client, and can be read again until some time after it."""
        return False

    async def begin(self, context: ServerContext, body: BodyT, caller: Caller) -> Api[BodyT]:
        """The API for one body, whose `close` must follow. Raises InputError or ApiError."""
        return self

    async def begin_line(self, context: ServerContext, body: BodyT, caller: Caller) -> Api[BodyT]:
        """The API for one line of a batch, whose `close` must follow.

        Raises InputError or ApiError, also for what lines may not ask for.
        """
        if self.wants_stream(body):
            raise InputError("stream", "Invalid value for 'stream': no line of a batch is streamed; leave it out.")
        return self

    async def ended(self, context: ServerContext, body: BodyT, owner: str, replies: ReplyFormat) -> None:
        """A reply of these to a body is over. Its client gets the end of it when this returns.

        replies: have made the end, whole or of a stream, which may be an error. Not called again for a stream that is
        resumed. Raises nothing.
        """

    async def close(self) -> None:
        """Nobody reads a reply any more, whether it has an end or not, or there is none. Raises nothing."""


#: All APIs by their prefixes.
APIS = web.AppKey("apis", dict[str, Api[Any]])


class EdgeState(Struct, frozen=True, array_like=True):
    """The state from which a reply can be made again. can_stream: it can be read again as a stream of events."""

    created: int
    body: bytes
    service_tier: str | None
    echoes: list[Echo]
    can_stream: bool


class Exchange(NamedTuple):
    """A body that is ready to be submitted. stream: the format of the stream, if it asks for one. has_ids: its events
    have ids.
    """

    body: RequestFields
    group: Sequence[Request]
    reply_format: ReplyFormat
    stream: StreamFormat | None
    has_ids: bool
    submission: Submission
    joins_outputs: bool

    @classmethod
    async def prepare(
        cls, context: ServerContext, api: Api[BodyT], body: BodyT, data: bytes, caller: Caller, received_ns: int
    ) -> Exchange:
        """data: the bytes of the body. Raises InputError or ApiError."""
        body.model = body.model or context.engine.model_names[0]
        scheduling = scheduling_fields(context, caller.principal, caller.class_header, caller.session_header, body)
        group, echoes = await api.make_requests(context, body, caller, received_ns, scheduling)
        key = caller.idempotency_key
        if key is not None and any(request.beams for request in group):
            raise InputError(IDEMPOTENCY_HEADER, f"'{IDEMPOTENCY_HEADER}' is not available with beam search.")
        identity = ReplyIdentity.draw(context.system, api.prefix)
        replies = api.reply_format(context, body, group, identity, echoes)
        stream = replies if isinstance(replies, StreamFormat) and api.wants_stream(body) else None
        is_kept = key is not None or context.config.resume_seconds > 0
        has_ids = stream is not None and is_kept and stream.framing.can_have_ids
        runs_on = api.runs_on(body)
        is_resumable = runs_on or has_ids or key is not None
        state = EdgeState(identity.created, data, body.service_tier, list(echoes), runs_on or has_ids)
        submission = Submission(
            reply_id=identity.reply_id,
            owner=caller.principal.owner,
            edge_state=msgspec.msgpack.encode(state) if is_resumable else b"",
            is_resumable=is_resumable,
            runs_on=runs_on,
            limits=caller.principal.limits,
            request_id=caller.request_id,
            traceparent=caller.traceparent,
            idempotency_key=key,
        )
        return cls(body, group, replies, stream, has_ids, submission, not (api.numbers_events and is_resumable))

    @classmethod
    def again(cls, context: ServerContext, api: Api[BodyT], reply: ResumedReply, state: EdgeState) -> Exchange:
        """The exchange of a resumable reply, from which it can be made again."""
        scheduling = reply.group[0].scheduling
        context = context.of_model(scheduling.model)
        body = decode_for(context, api, state.body)
        body.model = body.model or scheduling.asked_model or scheduling.model
        body.service_tier = state.service_tier
        identity = ReplyIdentity(reply.submission.reply_id, state.created)
        replies = api.reply_format(context, body, reply.group, identity, state.echoes)
        stream = replies if isinstance(replies, StreamFormat) and api.wants_stream(body) else None
        has_ids = stream is not None and state.can_stream
        return cls(body, reply.group, replies, stream, has_ids, reply.submission, not api.numbers_events)

    def read(self, generation: Generation) -> None:
        """Have a generation read as this needs it. All readers of a stream with a key get the same events."""
        generation.joins_outputs = self.joins_outputs
        if self.stream is not None and self.submission.idempotency_key is not None:
            generation.most_outputs = 1

    async def submit(self, context: ServerContext) -> Generation:
        """Submit the group. Raises ApiError. The generation must be released."""
        generation = await context.submit(self.group, self.submission, prompt_param=self.reply_format.prompt_param)
        self.read(generation)
        return generation

    async def whole(self, generation: Generation) -> Any:
        """The reply without streaming. Raises what ended a choice early."""
        pieces: list[list[ChoiceOutput]] = [[] for _ in range(generation.num_choices)]
        while not generation.is_over:
            for output in await generation.take():
                if (error := output.error) is not None:
                    raise error
                pieces[output.choice].append(output)
        reply = await self.reply_format.whole([join_outputs(outputs) for outputs in pieces], generation)
        return with_timings(reply, generation.rows) if self.body.wants_timings else reply


def decode_body(context: ServerContext, api: Api[BodyT], data: bytes) -> BodyT:
    """The body in a request's bytes, for the model that it names. Raises InputError."""
    return api.decode_forwarded(data) if context.forwards_body(data) else api.decode(data)


def decode_for(context: ServerContext, api: Api[BodyT], data: bytes) -> BodyT:
    """The same for the model of a context."""
    return api.decode_forwarded(data) if context.forwards else api.decode(data)


def edge_state(reply: ResumedReply) -> EdgeState:
    """The state with which a resumable reply was submitted."""
    return msgspec.msgpack.decode(reply.submission.edge_state, type=EdgeState)


def stream_again(
    context: ServerContext, apis: dict[str, Api[Any]], reply: ResumedReply, generation: Generation
) -> StreamFormat:
    """The format that makes the same events again from the outputs of a resumable reply. Raises UnknownReplyError for
    one that is no stream.
    """
    state, reply_id = edge_state(reply), reply.submission.reply_id
    if not state.can_stream:
        raise UnknownReplyError(f"the reply '{reply_id}' is no stream")
    api = next(api for prefix, api in apis.items() if reply_id.startswith(prefix))
    exchange = Exchange.again(context, api, reply, state)
    exchange.read(generation)
    assert isinstance(exchange.reply_format, StreamFormat)
    return exchange.reply_format
