"""What the recorder reports about lost events, by run. A run's log must have exactly the gaps that were reported."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from tests.world.invariants.checks import Checks

_LOSES = re.compile(r"the trace \S+/([^/]+)/trace\.jsonl.*; events are lost until ")
_WRITES = re.compile(
    r"the trace \S+/([^/]+)/trace\.jsonl is written again; (?:events (\d+) to (\d+) are not in it|no )"
)
#: A gap as a verification reports it.
_GAP = re.compile(r" has a gap: events (\d+) to (\d+) were not recorded ")


class Losses:
    """The losses of one run. num_told: how often a loss was reported; is_lossy: whether events are being lost now;
    missing: the first and last number of each reported gap. num_untold: how many gaps its engines may have left without
    having reported them, because they were killed.
    """

    def __init__(self) -> None:
        self.num_told = 0
        self.is_lossy = False
        self.missing: list[tuple[int, int]] = []
        self.num_untold = 0


class ToldLosses:
    """Collects reports of losses from the server's log lines."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._runs: defaultdict[str, Losses] = defaultdict(Losses)

    def hear(self, event: str) -> bool:
        """Take one line. Returns whether it reports that events are being lost from now on."""
        if loses := _LOSES.search(event):
            run = self._runs[loses[1]]
            run.num_told += 1
            run.is_lossy = True
        elif writes := _WRITES.search(event):
            run = self._runs[writes[1]]
            if writes[2]:
                self._checks.check("gaps are reported", run.is_lossy, f"nothing was told before: {event}")
                run.missing.append((int(writes[2]), int(writes[3])))
            run.is_lossy = False
        return loses is not None

    def of(self, run: str) -> Losses:
        """The losses of a run, by its name."""
        return self._runs[run]

    def was_killed(self, run: str) -> None:
        """The engine of a run has been killed, and another one may go on with it."""
        losses = self._runs[run]
        losses.num_untold += losses.is_lossy
        losses.is_lossy = False

    def go_on(self, run: str, first_s: int) -> None:
        """Another engine goes on with a run, from this event on."""
        losses = self._runs[run]
        losses.missing = [gap for gap in losses.missing if gap[1] < first_s]

    def check_gaps(self, run: str, warnings: Sequence[str], *, was_killed: bool, first_s: int = 0) -> None:
        """Check that the log of a run has exactly the gaps that were reported. first_s: number of the first event that
        was kept. warnings: those of the log's verification. A server that was killed may have resumed writing without
        having reported it.
        """
        told = self._runs[run]
        missing = [gap for gap in told.missing if gap[1] >= first_s]
        found = [(int(gap[1]), int(gap[2])) for gap in map(_GAP.search, warnings) if gap]
        untold = [gap for gap in found if gap not in missing]
        most_untold = told.num_untold + (was_killed and told.is_lossy)
        is_told = [gap for gap in found if gap in missing] == missing and len(untold) <= most_untold
        self._checks.check("gaps are reported", is_told, f"{run}: {found}, and told were {missing}")
