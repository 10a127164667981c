"""Writes a simulated run as an ordinary trace, which `eventlm replay` can verify."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

from msgspec import structs

from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.errors import ExitCode
from eventlm.events import Event, Header
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system

#: Events between two digests of the state; the default of a server too.
CHECKPOINT_EVENTS = 1000
#: Lines in one write.
LINES_PER_WRITE = 1000


class SimulatedTrace:
    """A subscriber that writes every event to `folder/<run>/trace.jsonl` and points `folder/latest` to it.

    If the folder has a run of that name, this one and its header get a number: `<run>-2`. The simulator makes the
    markers: pass it `checkpoint_events=CHECKPOINT_EVENTS`, and call its `end` before `close`, else the trace has no
    clean end. Raises LogWriteError if the disk fails; then nothing of the trace is left.
    """

    def __init__(self, folder: Path | str, run: str) -> None:
        system = real_system()
        names = chain([run], (f"{run}-{number}" for number in count(2)))
        self._run = next(name for name in names if system.disk.status(Path(folder) / name) is None)
        self._writer = LogWriter(system, folder, self._run)
        self._num_waiting = 0

    @staticmethod
    def check_folder(folder: Path | str) -> None:
        """Make the folder of the traces before work that would be lost. Raises LogWriteError if it cannot be used."""
        LogWriter.check_folder(real_system().disk, folder)

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self._writer.run_folder

    def see(self, event: Event) -> None:
        """Take the next event, the header first."""
        if isinstance(event, Header):
            event = structs.replace(event, run=self._run)
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
            self._writer.discard()
            # It could be written to at first.
            raise LogWriteError(
                f"cannot write to the trace {self._writer.path}: {self._writer.problem}; choose another folder",
                exit_code=ExitCode.FAILED,
            )

    def __enter__(self) -> SimulatedTrace:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
