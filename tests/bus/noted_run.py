"""A run in segments whose events are notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Raw

from eventlm.bus.log_writer import LogWriter
from eventlm.events import End, Event, Gap, Snapshot, UserMark
from eventlm.events.codec import encode_body
from eventlm.system.system import System, real_system
from tests.bus import traces


class NotedRun:
    """Writes notes, and starts segments as an engine core does."""

    def __init__(self, folder: Path, *, system: System | None = None, **options: Any) -> None:
        self.problems: list[str] = []
        self.writer = LogWriter(system or real_system(), folder, "run", on_problem=self.problems.append, **options)
        self.events: list[Event] = []
        self.writer.append(self._add(traces.header()))
        self.writer.flush()

    def _add(self, event: Event) -> bytes:
        self.events.append(event)
        return encode_body(event)

    def note(self, num_notes: int = 1) -> None:
        """One write of some notes."""
        for _ in range(num_notes):
            self.writer.append(self._add(UserMark(s=len(self.events), text="x" * 100)))
        self.writer.flush()

    def record(self, event: Event) -> None:
        """One write of an event of any kind."""
        self.writer.append(self._add(event))
        self.writer.flush()

    def turn(self) -> bool:
        """Start a segment, with a gap if there is one."""
        writer, missing = self.writer, (self.writer.next_s, len(self.events) - 1)

        def lines() -> Iterator[bytes]:
            yield self._add(traces.header(s=len(self.events), previous_h=previous_h))
            if problem:
                yield self._add(Gap(s=len(self.events), first=missing[0], last=missing[1], reason=problem))
            yield self._add(Snapshot(s=len(self.events), state=Raw(b"{}")))

        previous_h, problem = writer.previous_h, writer.problem
        return writer.start_segment(len(self.events), lines())

    def end(self) -> None:
        """Close the log cleanly."""
        self.writer.append(self._add(End(s=len(self.events))))
        self.writer.close()
