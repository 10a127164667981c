"""The events of a stream, each with an id from which a client can resume.

The id counts the engine's outputs up to and including this event, so it does not depend on how they were joined: `17`.
If outputs become several events, all but the last have a number too: `12-17.2` is the second event of the outputs 13 to
17. Events with an error have no id.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from eventlm.server.errors import ApiError, from_generation_error
from eventlm.server.openai.replies import ReplyIdentity, TokenIds, Usage
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import GenerationRequest, StreamOptions
from eventlm.text.tokenizer import Tokenizer

DONE = b"[DONE]"
#: What ids look like.
EVENT_ID_PATTERN = r"^([0-9]{1,15}|[0-9]{1,15}-[0-9]{1,15}\.[0-9]{1,9})$"
_ID = re.compile(EVENT_ID_PATTERN)
_encode = msgspec.json.Encoder().encode


class ReplyFormat(ABC):
    """The replies of one endpoint to one request. `echoes` are the prompts to show, if any."""

    #: The field that has the prompt, for errors.
    prompt_param: str

    def __init__(
        self, body: GenerationRequest, tokenizer: Tokenizer, identity: ReplyIdentity, echoes: Sequence[Echo] = ()
    ) -> None:
        self.identity = identity
        self.echoes = echoes
        self._tokenizer = tokenizer
        #: Chunks of a stream that will report its usage have a null until then.
        self._no_usage: UnsetType | None = None if body.includes_usage else UNSET
        self._returns_token_ids = bool(body.return_token_ids)

    def _token_ids(self, output: ChoiceOutput) -> TokenIds:
        return output.token_ids if self._returns_token_ids else UNSET

    @abstractmethod
    def opening(self, choice: int) -> Any | None:
        """The chunk before a choice's text, if the endpoint has one."""

    @abstractmethod
    def delta(self, output: ChoiceOutput) -> Any | None:
        """A chunk for an output; None if its text is held back."""

    @abstractmethod
    def finish(self, output: ChoiceOutput) -> Any:
        """A choice's last chunk, without text."""

    @abstractmethod
    def usage(self, usage: Usage) -> Any:
        """The stream's last chunk, if the client asked for it."""

    @abstractmethod
    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        """The reply without streaming, of all choices in order."""


class StreamPosition(NamedTuple):
    """A position in a stream: after all events of the first `base` outputs and `skip` events of the next `size`."""

    base: int = 0
    size: int = 0
    skip: int = 0

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """The position after the event with this id. Raises ValueError."""
        if not _ID.fullmatch(text):
            raise ValueError(text)
        base, *among = (int(number) for number in re.split("[-.]", text))
        if not among:
            return cls(base)
        end, skip = among
        if base > end:
            raise ValueError(text)
        return cls(base, end - base, skip)

    @property
    def end(self) -> int:
        """How many outputs the client has received, at least in part."""
        return self.base + self.size


class StreamEvents:
    """Makes the events of one stream. `error` is set when an output ends it with an error.

    has_ids: events have ids. skip: how many of the next events to leave out, since the client has received them.
    """

    def __init__(self, generation: Generation, replies: ReplyFormat, body: GenerationRequest, *, has_ids: bool) -> None:
        self.error: ApiError | None = None
        self.skip = 0
        self._generation = generation
        self._replies = replies
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._includes_timings = body.wants_timings
        # As vLLM does: without include_usage there is none in any chunk.
        self._has_usage_so_far = self._includes_usage and bool(options.continuous_usage_stats)
        self._has_ids = has_ids
        #: Until the first other event.
        self._openings = self._make_openings()
        self._base = generation.num_outputs

    def take(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The events of the outputs taken since the last call; empty if their text is held back."""
        payloads: list[bytes] = []
        for output in outputs:
            chunk = self._replies.delta(output)
            if chunk is not None:
                payloads.append(self._payload(chunk, output))
            if output.finished is not None:
                if (failure := output.error) is not None:
                    self.error = from_generation_error(failure)
                    break
                payloads.append(self._payload(self._replies.finish(output), output))
        if payloads and self._openings:
            payloads = self._openings + payloads
            self._openings = []
        return self._framed(payloads, is_whole=self.error is None)

    @property
    def num_tail_events(self) -> int:
        """Events of `tail`."""
        return 1 + (self._includes_usage or self._includes_timings)

    def tail(self) -> bytes:
        """The events after all outputs."""
        payloads = [self._summary()] if self._includes_usage or self._includes_timings else []
        # The event before these has the id of all outputs.
        return self._framed([*payloads, DONE], is_whole=False)

    @staticmethod
    def failure(error: ApiError) -> bytes:
        """The events that end a stream with an error."""
        return b"data: " + error.to_json() + b"\n\ndata: " + DONE + b"\n\n"

    def _summary(self) -> bytes:
        """Usage, timings, or both in one chunk."""
        chunk = self._replies.usage(Usage.of(self._generation.token_counts()))
        if not self._includes_usage:
            chunk = msgspec.structs.replace(chunk, usage=UNSET)
        return _encode(with_timings(chunk, self._generation.rows) if self._includes_timings else chunk)

    def _make_openings(self) -> list[bytes]:
        chunks = [(self._replies.opening(choice), choice) for choice in range(self._generation.num_choices)]
        return [
            self._payload(chunk, self._generation.beginning(choice)) for chunk, choice in chunks if chunk is not None
        ]

    def _payload(self, chunk: Any, output: ChoiceOutput) -> bytes:
        if self._has_usage_so_far:
            chunk = msgspec.structs.replace(chunk, usage=Usage.of(self._generation.token_counts_of(output)))
        return _encode(chunk)

    def _framed(self, payloads: list[bytes], *, is_whole: bool) -> bytes:
        """Payloads as events. Without `is_whole` they do not cover all outputs."""
        base, self._base = self._base, self._generation.num_outputs
        if not self._has_ids:
            return b"".join([b"data: " + payload + b"\n\n" for payload in payloads])
        end, last = self._base, len(payloads) if is_whole else 0
        events = [
            f"id: {end if number == last else f'{base}-{end}.{number}'}\ndata: ".encode() + payload + b"\n\n"
            for number, payload in enumerate(payloads, start=1)
        ]
        skip, self.skip = self.skip, 0
        return b"".join(events[skip:])
