"""What the logs on a simulated disk contain about each sequence at any moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.events import Arrived, Emitted, Event, Finished, Gap, Header, Launched, Relayed, StepCompleted, Streamed
from eventlm.events.codec import decode_body, split_line
from tests.world.invariants.checks import Checks
from tests.world.machine.disk import WorldDisk
from tests.world.machine.file_tree import File

_TAGS = tuple(
    f'{{"t":"{tag}"'.encode()
    for tag in ("header", "arrive", "launch", "done", "emit", "streamed", "relay", "finish", "gap")
)
#: The most bytes that one event of a backend's stream brings. Such an event may count as one token.
_MOST_BYTES = 16


class Sample(NamedTuple):
    """A sequence, identified by the seed of its request, which no other visit uses."""

    seed: str
    index: int


class Place(NamedTuple):
    """The event of a run with which a sequence has this many tokens that may be shown."""

    num_tokens: int
    run: str
    s: int


class _Steps:
    """The steps of one run. launched: steps that have no result yet, by replica, epoch and number; answered: the last
    step of each replica that has a result, with its launch, which is unknown after a gap.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.seeds: dict[int, str] = {}
        self.launched: dict[tuple[int, int, int], Launched] = {}
        self.answered: dict[int, tuple[StepCompleted, Launched | None]] = {}
        self.streamed: list[tuple[int, int, int, int]] = []
        self.has_gap = False
        #: The last event that was seen.
        self.last_s = -1
        #: The file that was read last.
        self.last: File | None = None


class LogWatch:
    """Reads what has been added to the logs since the last call. num_tokens: how many tokens of each sequence may be
    shown; finished: the sequences that have ended, and where; num_lines: lines of all runs.

    A line counts once it is written, even if it never reaches the medium.
    """

    def __init__(self, disk: WorldDisk, checks: Checks) -> None:
        self.num_lines = 0
        self.num_tokens: dict[Sample, int] = {}
        self.finished: dict[Sample, Place] = {}
        self._places: defaultdict[Sample, list[Place]] = defaultdict(list)
        self._disk = disk
        self._checks = checks
        self._runs: dict[Path, _Steps] = {}
        self._positions: dict[int, int] = {}
        #: The disk's number of changes when each run was last read.
        self._num_changes: dict[Path, int] = {}

    def read(self, run_folder: Path) -> None:
        """Read what was added to a run's files."""
        if self._num_changes.get(run_folder) == self._disk.num_changes:
            return
        self._num_changes[run_folder] = self._disk.num_changes
        steps = self._runs.setdefault(run_folder, _Steps(run_folder.name))
        reader = self._disk.of("watch")
        paths = [*(segment.path for segment in closed_segments(run_folder, reader)), run_folder / TRACE_NAME]
        # If a server died while it renamed a segment, a name may be missing.
        files = [self._disk.tree.find_file(path) for path in paths if reader.status(path) is not None]
        if steps.last is not None and steps.last not in files:
            # The file was removed meanwhile; read what had been added to it.
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
                        event = decode_body(split.body)
                        self._see(steps, event)
                        steps.last_s = event.s

    def place_of(self, sample: Sample, num_tokens: int, *, has_ended: bool) -> Place | None:
        """The first event after which this much of a sequence may be shown; None if it is not known. A backend's text
        has none before its end.
        """
        if has_ended:
            return self.finished.get(sample)
        places = self._places[sample]
        found = bisect_left(places, num_tokens, key=lambda place: place.num_tokens)
        return places[found] if found < len(places) else None

    def _see(self, steps: _Steps, event: Event) -> None:
        match event:
            case Header() if event.s <= steps.last_s:
                self._undo(steps, event.s)
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
                    sample = Sample(steps.seeds[event.request], event.index)
                    self.finished[sample] = Place(self.num_tokens.get(sample, 0), steps.run, event.s)

    def _undo(self, steps: _Steps, first_s: int) -> None:
        """The run goes on with event `first_s`, after which nothing had been shown."""
        for sample, places in self._places.items():
            if places and places[-1].run == steps.run and places[-1].s >= first_s:
                places[:] = [each for each in places if each.run != steps.run or each.s < first_s]
                self.num_tokens[sample] = places[-1].num_tokens if places else 0
        self.finished = {
            sample: place for sample, place in self.finished.items() if place.run != steps.run or place.s < first_s
        }
        steps.last_s = first_s

    def _relay(self, steps: _Steps, relayed: Relayed) -> None:
        """After a gap, some of the sequences may be unknown."""
        for row, (request, index, _, total) in enumerate(steps.streamed):
            if row not in relayed.dropped and request in steps.seeds:
                self.num_tokens[Sample(steps.seeds[request], index)] = total * _MOST_BYTES
        steps.streamed = []

    def _answer(self, steps: _Steps, done: StepCompleted) -> None:
        """Check that each result belongs to a launched step of the current worker, comes once, and not before the
        launch.
        """
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
                self.num_tokens[sample] = num_tokens = self.num_tokens.get(sample, 0) + produced
                self._places[sample].append(Place(num_tokens, steps.run, emitted.s))
