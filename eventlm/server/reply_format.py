"""The form of replies: what an API makes of a generation, whole or as a stream, and how its events are framed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from eventlm.server.errors import ApiError
from eventlm.system.system import System
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer

SERVER_SENT_EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"


class ReplyIdentity(NamedTuple):
    """The id and the time, in seconds, of a reply and of all its chunks."""

    reply_id: str
    created: int

    @classmethod
    def draw(cls, system: System, prefix: str) -> ReplyIdentity:
        """The identity of a new reply."""
        return cls(system.chance.identity(prefix), system.clock.unix_s())


class Framing(NamedTuple):
    """How events travel. frame: from an event and its JSON to bytes. can_have_ids: whether a client can resume."""

    media_type: str
    frame: Callable[[Any, bytes], bytes]
    can_have_ids: bool


#: Server-sent events without names, as OpenAI's chats and completions.
UNNAMED_EVENTS = Framing(SERVER_SENT_EVENTS, lambda _, payload: b"data: " + payload + b"\n\n", can_have_ids=True)
#: Server-sent events that are named as their structs are tagged.
NAMED_EVENTS = Framing(
    SERVER_SENT_EVENTS,
    lambda event, payload: b"event: %b\ndata: %b\n\n" % (event.__struct_config__.tag.encode(), payload),
    can_have_ids=True,
)
#: One JSON object a line.
LINES = Framing(JSON_LINES, lambda _, payload: payload + b"\n", can_have_ids=False)


class ReplyFormat(ABC):
    """The reply of one API to one request. `echoes` are the prompts to show, if any."""

    #: The field that has the prompt, for errors.
    prompt_param: str

    def __init__(self, tokenizer: Tokenizer, identity: ReplyIdentity, echoes: Sequence[Echo] = ()) -> None:
        self.identity = identity
        self.echoes = echoes
        self._tokenizer = tokenizer

    @abstractmethod
    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        """The reply without streaming, of all choices in order."""


class StreamFormat(ReplyFormat):
    """A reply that may be streamed.

    Events are structs. A stream consists of those of `begin`, of `events` for each output and of `end`, in this order;
    nothing is sent before the first that comes of an output. `failure` takes the place of the rest after an error.
    """

    framing: Framing = UNNAMED_EVENTS

    def begin(self, generation: Generation) -> Sequence[Any]:
        """The events before all others."""
        return ()

    @abstractmethod
    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        """The events of an output; none if its text is held back. `output.finished` is set in the last of a choice."""

    @abstractmethod
    def end(self, generation: Generation) -> Sequence[Any]:
        """The events after all outputs."""

    @abstractmethod
    def failure(self, error: ApiError) -> Sequence[Any]:
        """The events that end a stream with an error."""
