"""What a power failure leaves of a run's log. Any page or name may be lost that was neither synced nor brought to the
medium by the kernel itself. Everything before the first loss is there, and must verify.

With `record_sync` group, the log is synced before anything is shown; at an interval, it is synced within that time.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import TRACE_NAME, closed_segments
from eventlm.bus.segment_reader import SegmentReader
from eventlm.config import RecordConfig
from eventlm.errors import EventLMError
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.verifier import Verifier
from tests.world.machine.disk import WorldDisk
from tests.world.machine.world import SECOND

#: By how much a process that is not hindered may be late to sync.
_LATE_NS = SECOND
#: The contents of a run's files, by file number, in reading order.
Files = dict[int, bytes]


class _Shown(NamedTuple):
    """What was shown at a time of the world, up to an event; how many calls of the disk were slow before that, and how
    often losses were told.
    """

    at_ns: int
    s: int
    num_slow: int
    num_told: int


class ShownEvents:
    """The events of each run that clients have seen the effects of, as far as a power failure must leave them."""

    def __init__(self, record: RecordConfig, disk: WorldDisk) -> None:
        self._mode = record.record_sync
        self._interval_ns = record.record_sync_ms * 1_000_000
        self._disk = disk
        self._shown: defaultdict[str, list[_Shown]] = defaultdict(list)

    def add(self, run: str, s: int, now_ns: int, *, num_told: int) -> None:
        """An effect of this event of a run has been seen."""
        shown = self._shown[run]
        if self._mode != "none" and (not shown or s > shown[-1].s):
            shown.append(_Shown(now_ns, s, self._disk.num_slow, num_told))

    def go_on(self, run: str, first_s: int) -> None:
        """A run goes on with this event, and what came after it is no longer there."""
        self._shown[run] = [each for each in self._shown[run] if each.s < first_s]

    def last_to_stay(self, run: str, now_ns: int, *, hindered_until_ns: int, num_told: int) -> int:
        """The last event that a power failure must leave now; -1 if there is none. hindered_until_ns: until when the
        run's process may have been late to sync.
        """
        shown = self._shown[run]
        if self._mode == "interval":
            synced_ns = now_ns - self._interval_ns - _LATE_NS
            shown = [each for each in shown if hindered_until_ns <= each.at_ns <= synced_ns]
            shown = [each for each in shown if (each.num_slow, each.num_told) == (self._disk.num_slow, num_told)]
        return max((each.s for each in shown), default=-1)


def read_files(disk: WorldDisk, run_folder: Path) -> Files:
    """The files of a run as they are now; none if the run cannot be opened."""
    with contextlib.suppress(EventLMError), LogReader(run_folder, disk=disk.of("reader")) as reader:
        files = [disk.tree.find_file(path) for path in reader.segments]
        return {file.number: bytes(file.content) for file in files}
    return {}


def num_lines_left(before: Files, after: Files) -> int:
    """How many lines of a run can still be read, up to the first that a power failure has removed."""
    numbers, num_lines = [*before], 0
    for place, (number, content) in enumerate(after.items()):
        if number not in before or (place and numbers[numbers.index(number) - 1] != [*after][place - 1]):
            break
        lines = zip(before[number].split(b"\n")[:-1], content.split(b"\n")[:-1], strict=False)
        num_lines += len([*takewhile(lambda both: both[0] == both[1], lines)])
        if content != before[number]:
            break
    return num_lines


def is_left(before: bytes, after: bytes) -> bool:
    """Whether a file lost nothing but its end, and still has its first line."""
    return before.startswith(after) and b"\n" in after


def events_left(disk: WorldDisk, run_folder: Path) -> set[int]:
    """The numbers of all events of a run that can be read, each file by itself."""
    found = set()
    reader = disk.of("reader")
    with contextlib.suppress(FileNotFoundError):
        for path in (run_folder / TRACE_NAME, *(segment.path for segment in closed_segments(run_folder, reader))):
            with contextlib.suppress(EventLMError), SegmentReader(path, disk=reader) as segment:
                # One by one: those before a damaged line count.
                for line in segment:
                    found.add(line.s)
    return found


def verify_left(disk: WorldDisk, path: Path) -> int:
    """Verify all lines before the first that cannot be read. Returns how many there are. Raises Found."""
    num_lines = 0
    with contextlib.suppress(EventLMError), LogReader(path, disk=disk.of("reader")) as reader:
        verifier = Verifier(rebuild(reader.header), reader.header)
        for num_lines, line in enumerate(reader, 1):  # noqa: B007
            verifier.feed(line)
    return num_lines
