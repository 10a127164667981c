"""A message of Anthropic's API, whole or as a stream, from the text that a model writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw

from eventlm.engine.request import Request
from eventlm.server.anthropic.errors import error_reply
from eventlm.server.anthropic.protocol import MessagesRequest, TextBlock, ThinkingBlock
from eventlm.server.anthropic.replies import (
    BlockDelta,
    BlockEvent,
    ContentBlockDeltaEvent,
    ContentBlockStartEvent,
    ContentBlockStopEvent,
    InputJsonDelta,
    MessageDeltaEvent,
    MessageReply,
    MessageStartEvent,
    MessageStop,
    MessageStopEvent,
    MessageUsage,
    PingEvent,
    ReplyBlock,
    SignatureDelta,
    StopDelta,
    TextDelta,
    ThinkingDelta,
    ToolUseOutput,
)
from eventlm.server.errors import ApiError
from eventlm.server.reply_format import NAMED_EVENTS, ReplyIdentity, StreamFormat
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput, api_finish_reason
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.message import CallDelta, MessageParser, MessagePart, message_format
from eventlm.text.tools.parser_events import CallEnd, Content, Reasoning

#: How much of a tool's input may be held back without a sign of life.
_PING_CHARACTERS = 256


class MessageReplies(StreamFormat):
    """The reply to one body."""

    framing = NAMED_EVENTS
    prompt_param = "messages"

    def __init__(
        self,
        body: MessagesRequest,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        formats: Formats,
    ) -> None:
        super().__init__(tokenizer, identity)
        [request] = group
        self._body = body
        self._parser = MessageParser(message_format(request), formats)
        self._is_cut_by_context = request.max_tokens < body.max_tokens
        self._blocks = _BlockEvents(identity.reply_id, shows_thinking=body.shows_thinking)
        self._end: StopDelta | None = None

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> MessageReply:
        [output] = choices
        return self._message(generation, _content(self.events(output, generation)), self._end)

    def begin(self, generation: Generation) -> Sequence[Any]:
        return [MessageStartEvent(self._message(generation, [], None))]

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        events = list(self._blocks.of(self._parser.take(output)))
        if output.finished is not None:
            events += self._blocks.close()
            self._end = self._stop(output)
        return events

    def end(self, generation: Generation) -> Sequence[Any]:
        assert self._end is not None
        last = MessageDeltaEvent(self._end, self._usage(generation))
        return [with_timings(last, generation.rows) if self._body.wants_timings else last, MessageStopEvent()]

    def failure(self, error: ApiError) -> Sequence[Any]:
        return [error_reply(error)]

    def _message(self, generation: Generation, content: list[ReplyBlock], end: StopDelta | None) -> MessageReply:
        return MessageReply(
            id=self.identity.reply_id,
            model=self._body.model,
            content=content,
            stop_reason=None if end is None else end.stop_reason,
            stop_sequence=None if end is None else end.stop_sequence,
            usage=self._usage(generation),
        )

    def _usage(self, generation: Generation) -> MessageUsage:
        return MessageUsage.of(generation.token_counts(), self._body.used_tier)

    def _stop(self, output: ChoiceOutput) -> StopDelta:
        """How the message ended, from its last output."""
        assert output.finished is not None
        reason: MessageStop = "end_turn"
        if api_finish_reason(output.finished.reason) == "length":
            reason = "model_context_window_exceeded" if self._is_cut_by_context else "max_tokens"
        elif isinstance(output.stop_reason, str):
            return StopDelta("stop_sequence", output.stop_reason)
        elif self._parser.num_calls and self._parser.calls_are_complete:
            reason = "tool_use"
        return StopDelta(reason, None)


class _BlockEvents:
    """The events of the blocks that a message's parts make. One block ends before the next begins.

    The input of a call comes when it is whole, and only if it is a JSON object: clients fail at anything else.
    """

    def __init__(self, reply_id: str, *, shows_thinking: bool) -> None:
        self._reply_id = reply_id
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: type[ReplyBlock] | None = None
        #: What the open call has of its input so far.
        self._input: list[str] = []
        self._num_input = 0

    def of(self, parts: Iterable[MessagePart]) -> Iterator[BlockEvent]:
        """The events of the next parts."""
        for part in parts:
            match part:
                case Reasoning():
                    if self._open is not ThinkingBlock:
                        yield from self._begin(ThinkingBlock(""))
                    if self._shows_thinking:
                        yield self._delta(ThinkingDelta(part.text))
                case Content():
                    if self._open is not TextBlock:
                        yield from self._begin(TextBlock(""))
                    yield self._delta(TextDelta(part.text))
                case CallDelta():
                    if part.name:
                        yield from self._begin(
                            ToolUseOutput(self._derived_id("toolu_", part.index), part.name, Raw(b"{}"))
                        )
                    self._input.append(part.arguments)
                    before, self._num_input = self._num_input, self._num_input + len(part.arguments)
                    # The input is sent once it is whole. Clients and proxies must not take the silence for an end.
                    if before // _PING_CHARACTERS < self._num_input // _PING_CHARACTERS:
                        yield PingEvent()
                case CallEnd():
                    yield from self.close()

    def close(self) -> Iterator[BlockEvent]:
        """The events that end the open block, if there is one."""
        if self._open is ThinkingBlock:
            yield self._delta(SignatureDelta(self._derived_id("", self._index)))
        if self._open is ToolUseOutput and _is_object(text := "".join(self._input)):
            yield self._delta(InputJsonDelta(text))
        if self._open is not None:
            yield ContentBlockStopEvent(self._index)
        self._open = None

    def _begin(self, block: ReplyBlock) -> Iterator[BlockEvent]:
        yield from self.close()
        self._index += 1
        self._open = type(block)
        self._input, self._num_input = [], 0
        yield ContentBlockStartEvent(self._index, block)
        if not self._index:
            yield PingEvent()

    def _delta(self, delta: BlockDelta) -> BlockEvent:
        return ContentBlockDeltaEvent(self._index, delta)

    def _derived_id(self, prefix: str, number: int) -> str:
        """An id that is the same whenever the reply is made again from its tokens."""
        return prefix + blake2b(f"{self._reply_id}/{prefix}{number}".encode(), digest_size=12).hexdigest()


def _content(events: Iterable[BlockEvent]) -> list[ReplyBlock]:
    """The blocks that these events tell of, as a client puts them together."""
    blocks: list[ReplyBlock] = []
    pieces: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ContentBlockStartEvent):
            blocks.append(event.content_block)
        elif isinstance(event, ContentBlockDeltaEvent):
            pieces.setdefault(event.index, [])
            match event.delta:
                case TextDelta(text) | ThinkingDelta(text) | InputJsonDelta(text):
                    pieces[event.index].append(text)
                case SignatureDelta(signature):
                    blocks[event.index] = ThinkingBlock("", signature)
    for index, block in enumerate(blocks):
        text = "".join(pieces.get(index, []))
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking = text
            case ToolUseOutput():
                blocks[index] = ToolUseOutput(block.id, block.name, Raw((text or "{}").encode()))
    return blocks


def _is_object(text: str) -> bool:
    """Whether a call's input is a JSON object. One that was cut short is none."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
