"""Files of output lines: each line is there as soon as it is over, and survives the death of the process.

A line is written as a whole or not at all. A line that a crash has cut is removed when the file is opened again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from eventlm.server.batches.lines import EndedLine, OutputLine, ReplyUsage
from eventlm.server.batches.objects import BatchInputTokens, BatchOutputTokens, BatchUsage, RequestCounts
from eventlm.system.disk import Disk, WritableFile

_log = structlog.get_logger("eventlm.batches")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(EndedLine).decode
#: How much of a line is read at once.
_PIECE_BYTES = 1 << 20


def write_all(file: WritableFile, content: bytes) -> None:
    """Write all of it. Raises OSError; part of it may be there then."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(bytes(rest)) :]


class _Whole(NamedTuple):
    """A complete line, and where it ends in the file."""

    data: bytes
    end: int


class ResultFile:
    """An output or error file, which is made when its first line comes. Methods raise OSError."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._file: WritableFile | None = None
        self.num_bytes = 0

    def open(self, *, mends: bool = False) -> list[EndedLine]:
        """Go on with a file that may exist: its lines. Raises BlockingIOError if another process writes it.

        mends: a line that is damaged, as by a power failure, and all after it are removed. Raises ValueError otherwise.
        """
        self.num_bytes = 0
        if self._disk.status(self._path) is None:
            return []
        self._file = self._disk.append(self._path)
        ended = []
        for line in self._whole_lines():
            try:
                ended.append(_ended(line.data))
            except ValueError:
                if not mends:
                    raise
                _log.error(
                    "results of a batch are damaged; the lines from there on are run again", file=str(self._path)
                )
                break
            self.num_bytes = line.end
        self._cut()
        return ended

    def append(self, line: OutputLine) -> bytes:
        """Write a line. Returns it as it was written."""
        if self._file is None:
            self._file = self._disk.create(self._path)
        self._cut()
        content = _encode(line) + b"\n"
        write_all(self._file, content)
        self.num_bytes += len(content)
        return content

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Return once all lines survive a power failure, and close the file."""
        if self._file is not None:
            self._cut()
            self._file.sync()
        self.close()

    def _cut(self) -> None:
        """Remove what is left of a line that could not be written."""
        assert self._file is not None
        if self._file.status().num_bytes > self.num_bytes:
            self._file.truncate(self.num_bytes)

    def _whole_lines(self) -> Iterator[_Whole]:
        end = 0
        file = self._disk.open(self._path)
        try:
            pieces: list[bytes] = []
            while piece := file.readline(_PIECE_BYTES):
                pieces.append(piece)
                if piece.endswith(b"\n"):
                    data = b"".join(pieces)
                    end += len(data)
                    yield _Whole(data, end)
                    pieces = []
        finally:
            file.close()


class Results:
    """The output and the error file of one batch, and the counts of what is in them."""

    def __init__(self, disk: Disk, output: Path, errors: Path) -> None:
        self.output = ResultFile(disk, output)
        self.errors = self.output if errors == output else ResultFile(disk, errors)
        self.counts = RequestCounts()
        self.usage = BatchUsage()
        #: The custom_id of each line that is over, by its number.
        self.ended: dict[int, str | None] = {}

    def open(self, *, mends: bool = False) -> None:
        """Go on with what is there. Raises OSError, BlockingIOError, or ValueError for a file of something else.

        mends: see `ResultFile.open`. May be called again after an error.
        """
        self.counts, self.usage, self.ended = RequestCounts(), BatchUsage(), {}
        try:
            for file in self._files:
                for line in file.open(mends=mends):
                    self._count(line)
        except BaseException:
            self.close()
            raise

    def add(self, line: OutputLine) -> None:
        """Write a line. Raises OSError."""
        file = self.output if line.is_completed else self.errors
        self._count(_decode(file.append(line)))

    @property
    def num_bytes(self) -> int:
        """Of both files."""
        return sum(file.num_bytes for file in self._files)

    def finish(self) -> None:
        """Return once everything survives a power failure, and close the files. Raises OSError."""
        for file in self._files:
            file.finish()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    @property
    def _files(self) -> list[ResultFile]:
        return [self.output] if self.errors is self.output else [self.output, self.errors]

    def _count(self, line: EndedLine) -> None:
        self.ended[line.number] = line.custom_id
        before = self.counts
        self.counts = RequestCounts(
            completed=before.completed + line.is_completed, failed=before.failed + (not line.is_completed)
        )
        if line.usage is not None:
            self.usage = _added(self.usage, line.usage)


def _ended(data: bytes) -> EndedLine:
    """An output line. Raises ValueError for anything else."""
    try:
        line = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    # Its id has the number of a line.
    line.number  # noqa: B018
    return line


def _added(total: BatchUsage, reply: ReplyUsage) -> BatchUsage:
    read = reply.input_tokens_details or reply.prompt_tokens_details
    made = reply.output_tokens_details or reply.completion_tokens_details
    num_input = total.input_tokens + (reply.input_tokens or reply.prompt_tokens)
    num_output = total.output_tokens + (reply.output_tokens or reply.completion_tokens)
    cached = total.input_tokens_details.cached_tokens + ((read.cached_tokens if read else 0) or 0)
    reasoning = total.output_tokens_details.reasoning_tokens + ((made.reasoning_tokens if made else 0) or 0)
    return BatchUsage(
        input_tokens=num_input,
        input_tokens_details=BatchInputTokens(cached),
        output_tokens=num_output,
        output_tokens_details=BatchOutputTokens(reasoning),
        total_tokens=num_input + num_output,
    )
