"""The events of a stream, each with an id from which a client can resume.

The id counts the engine's outputs up to and including this event, so it does not depend on how they were joined: `17`.
If outputs become several events, all but the last have a number too: `12-17.2` is the second event of the outputs 13 to
17. Events with an error have no id.

After a loss, outputs that a client has seen may be gone, and others may come in their place. From then on ids say how
often that was so: `17~1`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from eventlm.server.errors import ApiError, from_generation_error
from eventlm.server.reply_format import StreamFormat
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.generation import Generation

#: What ids look like.
EVENT_ID_PATTERN = r"^([0-9]{1,15}|[0-9]{1,15}-[0-9]{1,15}\.[0-9]{1,9})(~[0-9]{1,9})?$"
_ID = re.compile(EVENT_ID_PATTERN)
_encode = msgspec.json.Encoder().encode


class StreamPosition(NamedTuple):
    """A position in a stream: after all events of the first `base` outputs and `skip` events of the next `size`.

    num_rewinds: how often the stream had lost outputs by then.
    """

    base: int = 0
    size: int = 0
    skip: int = 0
    num_rewinds: int = 0

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """The position after the event with this id. Raises ValueError."""
        if not _ID.fullmatch(text):
            raise ValueError(text)
        place, _, num_rewinds = text.partition("~")
        base, *among = (int(number) for number in re.split("[-.]", place))
        end, skip = among or (base, 0)
        if base > end:
            raise ValueError(text)
        return cls(base, end - base, skip, int(num_rewinds or 0))

    @property
    def end(self) -> int:
        """How many outputs the client has received, at least in part."""
        return self.base + self.size

    def rewound_to(self, rewinds: Sequence[int]) -> int | None:
        """How many of the client's outputs are still those of the stream; None if all are. rewinds: how many outputs
        were left each time that some were lost.
        """
        left = min(rewinds[self.num_rewinds :], default=self.end)
        return left if left < self.end else None


class StreamEvents:
    """Makes the events of one stream as bytes. `error` is set when an output ends it with an error.

    has_ids: events have ids. num_rewinds: how often the stream has lost outputs. skip: how many of the next events to
    leave out, since the client has received them.
    """

    def __init__(self, generation: Generation, replies: StreamFormat, *, has_ids: bool, num_rewinds: int = 0) -> None:
        self.error: ApiError | None = None
        self.skip = 0
        self.framing = replies.framing
        self._generation = generation
        self._replies = replies
        self._has_ids = has_ids
        self._after_rewinds = f"~{num_rewinds}" if num_rewinds else ""
        #: Until the first other event.
        self._openings = self._framed(replies.begin(generation))
        self._base = generation.num_outputs
        self._tail: bytes | None = None

    def begin(self) -> bytes:
        """The events before all others, which come with the first otherwise. They have no ids."""
        openings, self._openings = self._openings, []
        return b"".join(openings)

    def take(self, outputs: Sequence[ChoiceOutput]) -> bytes:
        """The events of the outputs taken since the last call; empty if their text is held back."""
        framed: list[bytes] = []
        failures = [failure for output in outputs if (failure := output.error) is not None]
        for output in outputs:
            if output.error is not None:
                # Its last text is still shown.
                output = msgspec.structs.replace(output, finished=None)
                # The one that failed first may come last: the others were cancelled because of it.
                self.error = from_generation_error(min(failures, key=lambda each: each.reason == "cancelled"))
            framed += self._framed(self._replies.events(output, self._generation))
            if self.error is not None:
                break
        return self._with_ids(framed, is_whole=self.error is None)

    def tail(self) -> bytes:
        """The events after all outputs."""
        if self._tail is None:
            # The event before these has the id of all outputs.
            self._tail = self._with_ids(self._framed(self._replies.end(self._generation)), is_whole=False)
        return self._tail

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream with an error."""
        return b"".join(self._framed(self._replies.failure(error)))

    def _framed(self, events: Sequence[Any]) -> list[bytes]:
        frame = self.framing.frame
        return [frame(event, _encode(event)) for event in events]

    def _with_ids(self, framed: list[bytes], *, is_whole: bool) -> bytes:
        """Events with their ids, after the openings if they are the first. Without `is_whole` they do not cover all
        outputs.
        """
        if framed and self._openings:
            framed, self._openings = self._openings + framed, []
        base, self._base = self._base, self._generation.num_outputs
        if not self._has_ids:
            return b"".join(framed)
        end, last = self._base, len(framed) if is_whole else 0
        events = [
            f"id: {end if number == last else f'{base}-{end}.{number}'}{self._after_rewinds}\n".encode() + event
            for number, event in enumerate(framed, start=1)
        ]
        skip, self.skip = self.skip, 0
        return b"".join(events[skip:])
