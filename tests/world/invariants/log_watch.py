"""What the logs on a simulated disk have of each sequence, at any moment."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.events import Arrived, Emitted, Event, Finished, Gap, Launched, Relayed, StepCompleted, Streamed
from eventlm.events.codec import decode_body, split_line
from tests.world.invariants.checks import Checks
from tests.world.machine.disk import WorldDisk
from tests.world.machine.file_tree import File

_TAGS = tuple(
    f'{{"t":"{tag}"'.encode() for tag in ("arrive", "launch", "done", "emit", "streamed", "relay", "finish", "gap")
)
#: Most bytes of what one event of a backend's stream brings, which may count as one token.
_MOST_BYTES = 16


class Sample(NamedTuple):
    """A sequence, by the seed of its request, which each visit has to itself."""

    seed: str
    index: int


class _Steps:
    """Of one run. launched: steps that have not been answered, by replica, epoch and number; answered: the last one of
    each replica, with its launch, which is unknown after a gap.
    """

    def __init__(self) -> None:
        self.seeds: dict[int, str] = {}
        self.launched: dict[tuple[int, int, int], Launched] = {}
        self.answered: dict[int, tuple[StepCompleted, Launched | None]] = {}
        self.streamed: list[tuple[int, int, int, int]] = []
        self.has_gap = False
        #: The file that has been read last.
        self.last: File | None = None


class LogWatch:
    """Reads what has been added whenever it is asked. num_tokens: that may be shown; finished: those that have
    ended; num_lines: of all runs.

    A line that was written is read here even if it does not reach the medium.
    """

    def __init__(self, disk: WorldDisk, checks: Checks) -> None:
        self.num_lines = 0
        self.num_tokens: dict[Sample, int] = {}
        self.finished: set[Sample] = set()
        self._disk = disk
        self._checks = checks
        self._runs: dict[Path, _Steps] = {}
        self._positions: dict[int, int] = {}
        #: Those that the disk had seen when a run was last read.
        self._num_changes: dict[Path, int] = {}

    def read(self, run_folder: Path) -> None:
        """Take what a run's files have got since."""
        if self._num_changes.get(run_folder) == self._disk.num_changes:
            return
        self._num_changes[run_folder] = self._disk.num_changes
        steps = self._runs.setdefault(run_folder, _Steps())
        reader = self._disk.of("watch")
        paths = [*(segment.path for segment in closed_segments(run_folder, reader)), run_folder / TRACE_NAME]
        # A server may have died between the names of a segment.
        files = [self._disk.tree.find_file(path) for path in paths if reader.status(path) is not None]
        if steps.last is not None and steps.last not in files:
            # It has been removed since, with what it had got.
            files.insert(0, steps.last)
        for file in files:
            steps.last = file
            start = self._positions.get(file.number, 0)
            end = file.content.rfind(b"\n", start) + 1
            if end > start:
                self._positions[file.number] = end
                for line in bytes(file.content[start : end - 1]).split(b"\n"):
                    self.num_lines += 1
                    split = split_line(line) if line.startswith(_TAGS) else None
                    if split is not None:
                        self._see(steps, decode_body(split.body))

    def _see(self, steps: _Steps, event: Event) -> None:
        match event:
            case Arrived():
                steps.seeds[event.s] = event.seed
            case Gap():
                steps.has_gap = True
            case Launched():
                steps.launched[event.replica, event.epoch, event.step] = event
            case StepCompleted():
                self._answer(steps, event)
            case Emitted():
                self._emit(steps, event)
            case Streamed():
                steps.streamed = event.rows
            case Relayed():
                self._relay(steps, event)
            case Finished():
                if event.request in steps.seeds:
                    self.finished.add(Sample(steps.seeds[event.request], event.index))

    def _relay(self, steps: _Steps, relayed: Relayed) -> None:
        """After a gap some of it may be unknown."""
        for row, (request, index, _, total) in enumerate(steps.streamed):
            if row not in relayed.dropped and request in steps.seeds:
                self.num_tokens[Sample(steps.seeds[request], index)] = total * _MOST_BYTES
        steps.streamed = []

    def _answer(self, steps: _Steps, done: StepCompleted) -> None:
        """Each result is of a step of the present worker, once, and was not there before that was launched."""
        launched = steps.launched.pop((done.replica, done.epoch, done.step), None)
        steps.answered[done.replica] = done, launched
        is_answer = steps.has_gap if launched is None else launched.ts <= done.start_ns
        self._checks.check("results are of what was launched", is_answer, f"{done} answers {launched}")

    def _emit(self, steps: _Steps, emitted: Emitted) -> None:
        done, launched = steps.answered.get(emitted.replica, (None, None))
        if done is None or launched is None or done.step != emitted.step:
            return
        dropped = dict(emitted.dropped)
        rows = (*launched.decodes, *launched.chunks)
        for row, ((request, index, *_), produced) in enumerate(zip(rows, done.produced, strict=True)):
            if produced and row not in dropped and request in steps.seeds:
                sample = Sample(steps.seeds[request], index)
                self.num_tokens[sample] = self.num_tokens.get(sample, 0) + produced
