"""What the recorder tells of events that it loses, by run. The gaps of the run's log must be just those."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from tests.world.invariants.checks import Checks

_LOSES = re.compile(r"the trace \S+/([^/]+)/trace\.jsonl.*; events are lost until ")
_WRITES = re.compile(
    r"the trace \S+/([^/]+)/trace\.jsonl is written again; (?:events (\d+) to (\d+) are not in it|no )"
)
#: As a verification reports them.
_GAP = re.compile(r" has a gap: events (\d+) to (\d+) were not recorded ")


class Losses:
    """Of one run. num_told: how often it was told that events are lost; is_lossy: it is so now; missing: first and last
    of those that are not in the log, as was told.
    """

    def __init__(self) -> None:
        self.num_told = 0
        self.is_lossy = False
        self.missing: list[tuple[int, int]] = []


class ToldLosses:
    """Hears lines of the server's log."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._runs: defaultdict[str, Losses] = defaultdict(Losses)

    def hear(self, event: str) -> bool:
        """One line; whether it tells that events are lost from now on."""
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
        """Of a run, by its name."""
        return self._runs[run]

    def check_gaps(self, run: str, warnings: Sequence[str], *, was_killed: bool, first_s: int = 0) -> None:
        """The log of a run has just the gaps that were told. first_s: of the first event that was kept. warnings: of
        its verification. A server that was killed may have begun to write again, and not have told it yet.
        """
        told = self._runs[run]
        missing = [gap for gap in told.missing if gap[1] >= first_s]
        found = [(int(gap[1]), int(gap[2])) for gap in map(_GAP.search, warnings) if gap]
        untold = found[len(missing) :]
        is_told = found[: len(missing)] == missing
        is_told = is_told and (not untold or (was_killed and told.is_lossy and len(untold) == 1))
        self._checks.check("gaps are reported", is_told, f"{run}: {found}, and told were {missing}")
