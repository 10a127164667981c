"""A simulated run as a trace like any other: `eventlm replay` verifies it, and all that reads traces reads it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.events import Event
from eventlm.events.codec import encode_body

#: Events between two digests of the state, as a server's default.
CHECKPOINT_EVENTS = 1000
#: So many lines go to the file in one write.
LINES_PER_WRITE = 1000


class SimulatedTrace:
    """A subscriber that writes every event to `folder/<run>/trace.jsonl` and points `folder/latest` to it.

    The simulator makes the markers: give it `checkpoint_events=CHECKPOINT_EVENTS`, and let it `end` before `close`; a
    trace without that says that it has no clean end. Raises LogWriteError where the disk does not take it: unlike a
    server a simulation has nothing to do that is worth more than its record.
    """

    def __init__(self, folder: Path | str, run: str) -> None:
        self._writer = LogWriter(folder, run)
        self._num_waiting = 0

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self._writer.run_folder

    @property
    def num_bytes(self) -> int:
        """What has been written."""
        return self._writer.num_bytes

    def see(self, event: Event) -> None:
        """Take the next event, the header first."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
