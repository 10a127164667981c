"""Writes a simulated run as an ordinary trace, which `eventlm replay` can verify."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.events import Event, Header
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system

#: Events between two digests of the state; the default of a server too.
CHECKPOINT_EVENTS = 1000
#: Lines in one write.
LINES_PER_WRITE = 1000


class SimulatedTrace:
    """A subscriber that writes every event to `folder/<run>/trace.jsonl` and points `folder/latest` to it.

    The simulator makes the markers: pass it `checkpoint_events=CHECKPOINT_EVENTS`, and call its `end` before `close`,
    else the trace has no clean end. Raises LogWriteError if the disk fails.
    """

    def __init__(self, folder: Path | str, run: str) -> None:
        self._writer = LogWriter(real_system(), folder, run)
        self._num_waiting = 0

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self._writer.run_folder

    def see(self, event: Event) -> None:
        """Take the next event, the header first."""
        if isinstance(event, Header):
            # The chain of a branch begins with the line of the run that it follows.
            self._writer.previous_h = event.previous_h
        self._writer.append(encode_body(event))
        self._num_waiting += 1
        if self._num_waiting >= LINES_PER_WRITE:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        self._num_waiting = 0
        self._writer.flush()
        if self._writer.problem:
            raise LogWriteError(
                f"cannot write to the trace {self._writer.path}: {self._writer.problem}; choose another folder"
            )

    def __enter__(self) -> SimulatedTrace:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
