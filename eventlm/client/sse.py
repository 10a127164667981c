"""Server-sent events, as in the WHATWG specification and a little more tolerant, and what OpenAI's streams bring.

Lines end in LF, CRLF or CR; lines that start with a colon are comments; several `data` lines of one event are joined
by LF; the space after the colon may be missing. Beyond the specification: a last event without its blank line counts,
and `error:` lines, in which some servers put their errors, are events too. Only the data matters here: `event`, `id`
and `retry` are read over.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class PromptDetails(Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class CompletionDetails(Struct, frozen=True):
    """Of the output's tokens."""

    reasoning_tokens: int | None = None


class TokenUsage(Struct, frozen=True):
    """Token counts as the server reports them; None where it leaves one out."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class StreamDelta(NamedTuple):
    """What one event of a stream adds to choice `choice`.

    `text` may be empty, as in the first chunk of a chat and in the last of a choice, and `usage` may come alone.
    `reasoning` is what some servers send apart from the answer. `received_ns` is `time.monotonic_ns()` at the read
    that brought the event.
    """

    choice: int
    text: str
    finish_reason: str | None
    usage: TokenUsage | None
    received_ns: int
    reasoning: str = ""


class SseDecoder:
    """Turns a stream's bytes, cut anywhere, into the data of its events."""

    def __init__(self) -> None:
        #: Parts of a line that has not ended yet.
        self._rest: list[bytes] = []
        #: `data` lines of an event that has not ended yet.
        self._lines: list[bytes] = []
        #: Bytes taken of that event, or of that line if it is the first.
        self.num_pending = 0
        self._ended_in_cr = False
        self._at_start = True

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; the data of the events that they complete."""
        if self._at_start or self._ended_in_cr or b"\r" in data:
            data = self._normalize(data)
        lines = data.split(b"\n")
        self._rest.append(lines[0])
        if len(lines) == 1:
            self.num_pending += len(data)
            return []
        lines[0] = b"".join(self._rest)
        rest = lines.pop()
        self._rest = [rest]
        events: list[bytes] = []
        pending = self._lines
        for line in lines:
            if line.startswith(b"data:"):
                pending.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line:
                if pending:
                    events.append(pending[0] if len(pending) == 1 else b"\n".join(pending))
                    pending.clear()
            elif line == b"data":
                pending.append(b"")
            elif line.startswith(b"error:"):
                events.append(b'{"error":' + line[6:] + b"}")
        self.num_pending = self.num_pending + len(data) if pending else len(rest)
        return events

    def end(self) -> list[bytes]:
        """The data of what the stream ended in, if that is an event without its blank line."""
        return self.feed(b"\n\n")

    def _normalize(self, data: bytes) -> bytes:
        """`data` with LF at the end of each line, without a byte order mark at the stream's start."""
        if self._at_start:
            data, self._rest = b"".join([*self._rest, data]), []
            if len(data) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(data):
                self._rest = [data]
                return b""
            self._at_start = False
            data = data.removeprefix(_BYTE_ORDER_MARK)
        if self._ended_in_cr and data:
            data = data.removeprefix(b"\n")
        if data:
            self._ended_in_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
