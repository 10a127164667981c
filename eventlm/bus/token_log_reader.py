"""Reading the token log of a segment in step with the trace: what it holds for a fact, if its line is sound and can be
of that fact.

A line that does not fit the chain is damage. It is left out and counted; those after it are checked against the hash
that it claims, so that one bad line costs only itself. A torn tail is none: it has no fact.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from eventlm.bus.run_folder import TOKENS_NAME, closed_name, tokens_name
from eventlm.bus.segment_reader import MAX_LINE_BYTES, corrupt
from eventlm.bus.token_log import TOKEN_LOG_FORMAT, OutputTokens, PromptTokens, TokenLogLine, TokenLogStart, decode_line
from eventlm.errors import EventLMError, TraceVersionError, UsageError
from eventlm.events import Arrived, Header, StepCompleted
from eventlm.events.codec import chain, split_line
from eventlm.system.disk import SYSTEM_DISK, Disk


def open_token_log(trace: Path | str, header: Header, disk: Disk = SYSTEM_DISK) -> TokenLogReader:
    """The token log of the segment in the file `trace` that begins with `header`.

    Raises UsageError where there is none, with what to do, and what TokenLogReader raises where that may be why.
    """
    if header.level != "tokens":
        raise UsageError(
            f"{trace} was recorded without token ids, and without them nothing can be run again; "
            "record with --record-tokens"
        )
    folder = Path(trace).parent
    broken: EventLMError | None = None
    # In this order nothing is missed while a writer, alive or dead, is about to begin the next segment.
    for name in (TOKENS_NAME, tokens_name(closed_name(header.s))):
        try:
            token_log = TokenLogReader(folder / name, disk)
        except FileNotFoundError:
            continue
        except EventLMError as error:
            # It may be that of another segment.
            broken = error
            continue
        if token_log.is_of(header):
            return token_log
        token_log.close()
    if broken is not None:
        raise broken
    if disk.status(Path(trace)) is None:
        raise UsageError(f"{trace} was removed while it was read; try again")
    raise UsageError(
        f"the token log of {trace} is missing: the file {TOKENS_NAME} that was written beside it with --record-tokens"
    )


class TokenLogReader:
    """The lines of one file by their facts, asked for in the order of the trace.

    digest_key: of the run's completions. damage: where lines were left out, in words. Raises UsageError for a file that
    cannot be read, TraceCorruptError for a first line that is damaged, and TraceVersionError.
    """

    def __init__(self, path: Path, disk: Disk = SYSTEM_DISK) -> None:
        self.path = str(path)
        self.damage: list[str] = []
        self._h = ""
        self._number = 0
        self._byte_offset = 0
        try:
            self._file = disk.open(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UsageError(f"cannot read the token log {path}: {error.strerror}") from error
        try:
            self._start = self._read_start()
            self.digest_key = self._read_key()
        except BaseException:
            self._file.close()
            raise
        self._next = self._read()

    def is_of(self, header: Header) -> bool:
        """Whether it is that of the segment that begins so."""
        return (self._start.run, self._start.s) == (header.run, header.s)

    def _read_start(self) -> TokenLogStart:
        split = split_line(self._file.readline(MAX_LINE_BYTES)[:-1])
        start = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            start = decode_line(split.body) if split is not None else None
        if split is None or not isinstance(start, TokenLogStart):
            raise corrupt(self.path, 1, 0, "it is not the first line of a token log")
        if start.format != TOKEN_LOG_FORMAT:
            raise TraceVersionError(f"{self.path} has format {start.format}; this eventlm reads {TOKEN_LOG_FORMAT}")
        if chain(start.previous_h, split.body) != split.claimed_h:
            raise corrupt(self.path, 1, 0, "the hash of its first line does not match")
        self._number, self._h, self._byte_offset = 1, split.claimed_h, self._file.tell()
        return start

    def _read_key(self) -> bytes:
        try:
            return bytes.fromhex(self._start.digest_key)
        except ValueError as error:
            raise corrupt(self.path, 1, 0, "its key is not hexadecimal") from error

    def _read(self) -> TokenLogLine | None:
        """The next sound line."""
        while (line := self._file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            self._number += 1
            split = split_line(line[:-1])
            is_sound = split is not None and chain(self._h, split.body) == split.claimed_h
            self._h = split.claimed_h if split is not None else ""
            where = f"line {self._number}, byte {self._byte_offset}"
            self._byte_offset += len(line)
            if split is not None and is_sound:
                try:
                    return decode_line(split.body)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    pass
            self.damage.append(f"{self.path} is damaged at {where}")
        return None

    def _at(self, s: int) -> TokenLogLine | None:
        while self._next is not None and self._next.s < s:
            self._next = self._read()
        return self._next if self._next is not None and self._next.s == s else None

    def prompt(self, fact: Arrived) -> PromptTokens | None:
        """What there is of an arrival."""
        found = self._at(fact.s)
        if isinstance(found, PromptTokens) and len(found.token_ids) == fact.prompt_tokens:
            return found
        return None

    def outputs(self, fact: StepCompleted) -> OutputTokens | None:
        """What there is of a completion."""
        found = self._at(fact.s)
        if isinstance(found, OutputTokens) and list(map(len, found.tokens)) == fact.produced:
            return found
        return None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TokenLogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
