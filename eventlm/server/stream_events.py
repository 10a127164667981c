"""What a stream consists of: outputs become events, and each event has an id from which a client can go on.

The id counts the engine's outputs that are told by the events up to and including this one, so it does not depend on
how they were joined: `17`. Where outputs make several events, all but the last are named by the place among them:
`12-17.2` is the second event of those that tell the outputs 13 to 17. An event that tells of an error has no id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from eventlm.server.errors import ApiError, from_generation_error
from eventlm.server.responses import ReplyIdentity, Usage
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import GenerationRequest, StreamOptions

DONE = b"[DONE]"
#: Of the ids, for those who describe the server.
EVENT_ID_PATTERN = r"^([0-9]{1,15}|[0-9]{1,15}-[0-9]{1,15}\.[0-9]{1,9})$"
_ID = re.compile(EVENT_ID_PATTERN)
_encode = msgspec.json.Encoder().encode


class ReplyFormat(Protocol):
    """The shapes of one endpoint's replies."""

    #: Field that holds the prompt, for errors.
    prompt_param: str
    identity: ReplyIdentity
    #: The prompts to be shown, where there are any to be.
    echoes: Sequence[Echo]

    def opening(self, choice: int) -> Any | None:
        """The chunk that comes before a choice's text, if the endpoint has one."""
        ...

    def delta(self, output: ChoiceOutput) -> Any | None:
        """A chunk with what an output says, if it says anything: text may be held back."""
        ...

    def finish(self, output: ChoiceOutput) -> Any:
        """A choice's last chunk, without text."""
        ...

    def usage(self, usage: Usage) -> Any:
        """The stream's last chunk, if the client asked for it."""
        ...

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        """The reply that is not streamed, of all choices in their order."""
        ...


class StreamPosition(NamedTuple):
    """A place in a stream: behind all events of the first `base` outputs and `skip` events of the next `size`."""

    base: int = 0
    size: int = 0
    skip: int = 0

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """The place behind the event with this id. Raises ValueError."""
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
        """Outputs that whoever stands here has heard of."""
        return self.base + self.size


class StreamEvents:
    """Makes the events of one stream; `error` is set when an output says that there will be no more.

    With `has_ids` every event has its id. `skip` events of the next ones are left out, which the client has had.
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
        #: Until something is said.
        self._openings = self._make_openings()
        self._base = generation.num_outputs

    def take(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The events of what was taken from the generation since the last call; none if that says nothing."""
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
        """The events that end a stream whose outputs have all been told."""
        payloads = [self._summary()] if self._includes_usage or self._includes_timings else []
        # That all outputs are told is the id of what came before.
        return self._framed([*payloads, DONE], is_whole=False)

    @staticmethod
    def failure(error: ApiError) -> bytes:
        """The events that end a stream by an error."""
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
        """As events. Without `is_whole` not all that there is to tell of the outputs is in them."""
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
