"""Findings about replicas that are other servers: attempts that fail, backends that were down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from eventlm.events.forwarding import DRAINED, REMOVED
from eventlm.formatting import counted
from eventlm.look.findings.finding import Finding, RunColumns
from eventlm.look.words import percent
from eventlm.replay.index.tables import MarkKind

#: Failed attempts of all, from which on they matter.
_FAILING_PPM = 20_000
_MIN_FAILED = 5
_MAX_NAMED = 20


def find_failing_backends(run: RunColumns) -> Iterator[Finding]:
    """Attempts fail."""
    marks = run.index.marks
    rows = np.flatnonzero((marks["kind"] == MarkKind.FORWARD_FAILED) & np.isin(marks["replica"], run.replicas))
    num_attempts = int(np.isin(run.index.attempts["replica"], run.replicas).sum())
    share = run.share_ppm(len(rows), num_attempts)
    if len(rows) < _MIN_FAILED or share < _FAILING_PPM:
        return
    kinds = Counter(run.index.name(text) for text in marks["text"][rows].tolist())
    worst, count = Counter(marks["replica"][rows].tolist()).most_common(1)[0]
    name = run.index.backend_names.get(worst, f"backend {worst}")
    identities = zip(marks["request"][rows].tolist(), marks["index"][rows].tolist(), strict=True)
    lost = Counter(identities)
    num_ended = sum(1 for each in lost if _has_failed(run, *each))
    listed = ", ".join(f"{kind} {number:,}" for kind, number in kinds.most_common())
    yield Finding(
        kind="backend_failing",
        title=f"{percent(share)} of attempts at backends failed",
        text=f"{len(rows):,} of {counted(num_attempts, 'attempt')}: {listed}. Most often failed {name}: "
        f"{count:,}. {counted(num_ended, 'sequence')} ended with an error after that.",
        culprit=name,
        impact_ppm=share,
        figures={"num_failed": len(rows), "num_attempts": num_attempts, "num_ended": num_ended},
        requests=[each for each, _ in lost.most_common(_MAX_NAMED)],
        s=int(marks["s"][rows[0]]),
        ts=int(marks["ts"][rows[0]]),
    )


def _has_failed(run: RunColumns, request: int, index: int) -> bool:
    row = run.index.find_row(request, index)
    return row is not None and run.index.name(int(run.index.requests["reason"][row])) == "error"


def find_down_backends(run: RunColumns) -> Iterator[Finding]:
    """Backends went down, and no operator had asked for it."""
    marks = run.index.marks
    rows = np.flatnonzero((marks["kind"] == MarkKind.BACKEND_DOWN) & np.isin(marks["replica"], run.replicas))
    texts = map(run.index.name, marks["text"][rows].tolist())
    rows = rows[np.array([text not in (DRAINED, REMOVED) for text in texts], bool)]
    if not len(rows):
        return
    reasons = Counter(run.index.name(text) for text in marks["text"][rows].tolist())
    replicas = sorted(set(marks["replica"][rows].tolist()))
    names = [run.index.backend_names.get(replica, f"backend {replica}") for replica in replicas]
    yield Finding(
        kind="backend_down",
        title=f"Backends went down {counted(len(rows), 'time')}",
        text=f"They got nothing more until they were up again. Most often: {reasons.most_common(1)[0][0]}.",
        culprit=", ".join(names),
        impact_ppm=run.share_ppm(len(replicas), len(run.replicas)),
        figures={"num_downs": len(rows), "num_backends": len(replicas)},
        s=int(marks["s"][rows[0]]),
        ts=int(marks["ts"][rows[0]]),
    )
