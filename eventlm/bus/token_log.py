"""The token log of a trace: token ids, which the trace itself never holds, in a file beside each of its segments.

    DIR/<run>/tokens.jsonl                  beside trace.jsonl
    DIR/<run>/tokens-000000000000.jsonl     beside trace-000000000000.jsonl

Lines are those of the trace (JSON, closed by a chained hash), in a chain of their own. `s` is that of the fact that a
line belongs to. A line is written before its fact, so every fact of the trace has its line; the reverse need not hold.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, Union

import msgspec
from msgspec import Struct

from eventlm.bus.run_folder import NEXT_TOKENS_NAME, TOKENS_NAME, closed_name, tokens_name
from eventlm.bus.segment_file import Extent, SegmentFile
from eventlm.events.codec import split_line
from eventlm.sampling_params import SamplingParams
from eventlm.system.disk import Disk

TOKEN_LOG_FORMAT = 1


class TokenLogLine(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="t"):
    """One line. `s` is that of the fact that it belongs to."""

    s: int


class TokenLogStart(TokenLogLine, frozen=True, kw_only=True, tag="tokens"):
    """The first line; its `s` is that of the segment's header.

    digest_key: hexadecimal, of the digests in the run's completions. previous_h: the last hash of the token log of the
    segment before.
    """

    format: int
    run: str
    digest_key: str
    previous_h: str = ""


class PromptTokens(TokenLogLine, frozen=True, kw_only=True, tag="prompt"):
    """What an arrival lacks of its request. The seed in force is in the arrival, so `params` has none.

    cache_salt: a keyed hash of the request's own, equal where those are.
    """

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""


class OutputTokens(TokenLogLine, frozen=True, kw_only=True, tag="outputs"):
    """The tokens of a completion, a list for each row of the launch."""

    tokens: list[list[int]]


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type=Union[TokenLogStart, PromptTokens, OutputTokens])  # noqa: UP007


def encode_line(line: TokenLogLine) -> bytes:
    """The line without its closing hash."""
    return _encoder.encode(line)[:-1]


def decode_line(body: bytes) -> TokenLogLine:
    """The line of a body. Raises msgspec.DecodeError for what is none."""
    line: TokenLogLine = _decoder.decode(body + b"}")
    return line


def last_token_log(disk: Disk, run_folder: Path, last: SegmentFile) -> SegmentFile:
    """The file beside the last segment of a run that goes on. What it has beyond that is cut off. Raises OSError."""
    # The second name is its own if the next segment was about to begin.
    for name in (TOKENS_NAME, tokens_name(closed_name(last.first_s))):
        written = _written(disk.read(run_folder / name), last)
        if written is not None:
            break
    else:
        raise FileNotFoundError(errno.ENOENT, "the token log of its last segment is missing")
    path = run_folder / name
    file = disk.append(path)
    file.truncate(written.num_bytes)
    file.sync()
    return SegmentFile(disk, path, first_s=last.first_s, file=file, written=written)


def _written(content: bytes, last: SegmentFile) -> Extent | None:
    """What a file has of a segment; None if it is of another."""
    h, num_lines, num_bytes = "", 0, 0
    for line in content.splitlines(keepends=True):
        split = split_line(line[:-1])
        if split is None or not line.endswith(b"\n"):
            break
        try:
            s = decode_line(split.body).s
        except msgspec.DecodeError:
            break
        if not num_lines and s != last.first_s:
            return None
        if s >= last.first_s + last.written.num_lines:
            break
        h, num_lines, num_bytes = split.claimed_h, num_lines + 1, num_bytes + len(line)
    return Extent(num_lines, num_bytes, h) if num_lines else None


class TokenLogWriter:
    """The token log's files of a run, mode 0600, each begun and closed with the trace's segment. Raises OSError.

    The first file is made at once, in a folder that is there. last: that of the last segment of a run that goes on.
    """

    def __init__(self, disk: Disk, run_folder: Path, digest_key: bytes, last: SegmentFile | None = None) -> None:
        self._disk = disk
        self._folder = run_folder
        self._key = digest_key
        self._file = last or SegmentFile(disk, run_folder / TOKENS_NAME, first_s=0)
        self._next: SegmentFile | None = None
        self._bodies = [] if last is not None else [self._start(0)]

    def _start(self, first_s: int) -> bytes:
        return encode_line(
            TokenLogStart(
                s=first_s,
                format=TOKEN_LOG_FORMAT,
                run=self._folder.name,
                digest_key=self._key.hex(),
                previous_h=self._file.written.last_h,
            )
        )

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the present file."""
        return self._file.num_own_bytes

    def append(self, bodies: list[bytes]) -> None:
        """Take lines, to be written by the next `flush`."""
        self._bodies += bodies

    def clear(self) -> None:
        """Forget what was appended and is not written."""
        self._bodies.clear()

    def flush(self) -> OSError | None:
        """Write all that was appended; what kept that from happening."""
        bodies, self._bodies = self._bodies, []
        return self._file.write(bodies)

    def sync(self) -> OSError | None:
        """Return once all that was flushed survives a power failure, or what keeps it from that."""
        return self._file.sync()

    def start_file(self, first_s: int) -> None:
        """Make the file of the segment whose header is event `first_s`. The last one stays in use."""
        self._file.truncate()
        path = self._folder / NEXT_TOKENS_NAME
        self._disk.unlink(path)
        self._next = SegmentFile(self._disk, path, first_s=first_s, previous_h=self._file.written.last_h)
        error = self._next.write([self._start(first_s)])
        if error is not None:
            raise error
        self._next.begin()

    def sync_next(self) -> OSError | None:
        """As `sync`, for the file that was made last."""
        assert self._next is not None
        return self._next.sync()

    def name_closed(self) -> None:
        """Give the file in use the name that it has once its segment is closed."""
        self._file.close_as(self._folder / tokens_name(closed_name(self._file.first_s)))

    def name_next(self) -> None:
        """Give the file that was made last the name of the one in use. Done before the trace's gets its own."""
        assert self._next is not None
        self._next.rename(self._folder / TOKENS_NAME)

    def go_on(self) -> None:
        """The segment has begun: close the file before."""
        assert self._next is not None
        self._file.close()
        self._file, self._next = self._next, None

    def go_back(self) -> None:
        """The segment could not be begun. A file that was renamed goes on under its closed name."""
        if self._next is not None:
            self._next.remove()
            self._next = None

    def close(self) -> None:
        """Cut off half a line, if there is one, and close the file."""
        try:
            self._file.truncate()
        finally:
            self._file.close()

    def remove(self) -> None:
        """Close the file and take its name away."""
        self._file.remove()
