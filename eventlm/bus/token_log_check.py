"""Checks the token logs of a trace, for `trace check`: every fact with tokens needs a valid line there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.bus.segment_reader import LogLine
from eventlm.bus.token_log_reader import TokenLogReader, open_token_log
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import Arrived, Header, StepCompleted


class TokenLogCheck(Struct, frozen=True, kw_only=True):
    """The token logs of a trace's files.

    num_prompts, num_steps: facts that have their tokens; num_without: those that have not, in the files whose token log
    is there. missing: messages about those that are not; they may have been removed to keep the texts private.
    damage: where lines were left out.
    """

    num_prompts: int
    num_steps: int
    num_without: int
    missing: list[str]
    damage: list[str]

    @property
    def is_sound(self) -> bool:
        """Whether what is there is whole."""
        return not (self.num_without or self.damage)


def check_token_logs(
    path: Path | str, *, on_progress: Callable[[int, int], None] | None = None
) -> TokenLogCheck | None:
    """Look up the tokens of every fact; None for a trace that was recorded without.

    Raises as LogReader does, and TraceVersionError for a token log of another version.
    """
    with LogReader(path) as reader:
        if reader.header.level != "tokens":
            return None
        with contextlib.closing(_Check()) as check:
            for line in reader:
                if line.tag in ("header", "arrive", "done"):
                    check.take(line)
                    if on_progress is not None:
                        on_progress(reader.position, reader.size_bytes)
            return check.result()


class _Check:
    """Takes the lines of a trace in their order, from the first."""

    def __init__(self) -> None:
        self._token_log: TokenLogReader | None = None
        self._num_prompts = self._num_steps = self._num_without = 0
        self._missing: list[str] = []
        self._damage: list[str] = []

    def take(self, line: LogLine) -> None:
        event = line.event()
        if isinstance(event, Header):
            self.close()
            self._open(line.path, event)
        elif self._token_log is None:
            return
        elif isinstance(event, Arrived):
            is_there = self._token_log.prompt(event) is not None
            self._num_prompts += is_there
            self._num_without += not is_there
        elif isinstance(event, StepCompleted):
            is_there = self._token_log.outputs(event) is not None
            self._num_steps += is_there
            self._num_without += not is_there

    def _open(self, trace: str, header: Header) -> None:
        try:
            self._token_log = open_token_log(trace, header)
        except UsageError as error:
            self._missing.append(str(error))
        except TraceCorruptError as error:
            self._damage.append(str(error))

    def close(self) -> None:
        """Close the present token log, and keep its damage."""
        if self._token_log is not None:
            self._damage += self._token_log.damage
            self._token_log.close()
            self._token_log = None

    def result(self) -> TokenLogCheck:
        self.close()
        return TokenLogCheck(
            num_prompts=self._num_prompts,
            num_steps=self._num_steps,
            num_without=self._num_without,
            missing=self._missing,
            damage=self._damage,
        )
