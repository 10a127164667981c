"""The events of a streamed response, tagged with their names. `sequence_number` counts them from 0.

Structs of deltas are made for each token: few fields, none of them built anew.
"""

from __future__ import annotations

from typing import Union

from msgspec import Struct

from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.responses.replies import OutputItem, OutputText, ReasoningText, Response


class _Lifecycle(Struct, frozen=True, tag_field="type"):
    sequence_number: int
    response: Response


class ResponseCreated(_Lifecycle, frozen=True, tag="response.created"):
    """The first event: the response as it was accepted."""


class ResponseQueued(_Lifecycle, frozen=True, tag="response.queued"):
    """It runs in the background and waits."""


class ResponseInProgress(_Lifecycle, frozen=True, tag="response.in_progress"):
    """It is being generated."""


class ResponseCompleted(_Lifecycle, frozen=True, tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(_Lifecycle, frozen=True, tag="response.incomplete"):
    """The last event of a response that reached a limit."""


class ResponseFailed(_Lifecycle, frozen=True, tag="response.failed"):
    """The last event of a response that ended with an error."""


class ResponseErrorEvent(Struct, frozen=True, tag_field="type", tag="error"):
    """What went wrong, in this server's words. `response.failed` follows, with one of OpenAI's codes."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None


class OutputItemAdded(Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    """An item begins."""

    sequence_number: int
    output_index: int
    item: OutputItem


class OutputItemDone(Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    """An item is over."""

    sequence_number: int
    output_index: int
    item: OutputItem


class ContentPartAdded(Struct, frozen=True, tag_field="type", tag="response.content_part.added"):
    """The part of a message or of reasoning begins."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class ContentPartDone(Struct, frozen=True, tag_field="type", tag="response.content_part.done"):
    """The part is over."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class OutputTextDelta(Struct, gc=False, tag_field="type", tag="response.output_text.delta"):
    """The next text of a message, with the log-probabilities of its tokens if they were asked for."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(Struct, frozen=True, tag_field="type", tag="response.output_text.done"):
    """The whole text of a message."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(Struct, gc=False, tag_field="type", tag="response.reasoning_text.delta"):
    """The next text of reasoning."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(Struct, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    """The whole text of reasoning."""

    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class CallArgumentsDelta(Struct, gc=False, tag_field="type", tag="response.function_call_arguments.delta"):
    """The next text of a call's arguments."""

    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class CallArgumentsDone(Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = Union[  # noqa: UP007
    ResponseCreated,
    ResponseQueued,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseErrorEvent,
    ResponseFailed,
]
