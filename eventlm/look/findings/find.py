"""All findings of a run."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from eventlm.look.findings.backends import find_down_backends, find_failing_backends
from eventlm.look.findings.finding import Finding, RunColumns
from eventlm.look.findings.queueing import find_head_of_line, find_rejections, find_saturation, find_starvation
from eventlm.look.findings.replicas import (
    find_dead_engines,
    find_failing_plugins,
    find_imbalance,
    find_lost_hits,
    find_lost_workers,
)
from eventlm.look.findings.steps import find_predictor_off, find_stalls, find_thrash
from eventlm.replay.index.index import Index
from eventlm.replay.index.replicaset import of_replicaset

_ALWAYS = (
    find_saturation,
    find_starvation,
    find_rejections,
    find_thrash,
    find_predictor_off,
    find_lost_workers,
    find_failing_plugins,
)
#: These need what only the core's state shows.
_OF_STATES = (find_head_of_line, find_stalls, find_imbalance, find_lost_hits)
#: Of a replicaset of other servers, whose steps and blocks nobody knows.
_OF_BACKENDS = (
    find_saturation,
    find_starvation,
    find_rejections,
    find_failing_backends,
    find_down_backends,
    find_failing_plugins,
)
#: What may follow from other findings of its replicaset comes after them.
_CONSEQUENCES = ("saturation", "rejections")


def find_all(index: Index) -> list[Finding]:
    """What is wrong with a run, causes before consequences, the worst first. Of a run that is not verified: as far as
    its log shows it. Of several replicasets each is looked at alone, and titles begin with its name and model.
    """
    if not len(index.drains):
        return []
    of_workers = _ALWAYS + (_OF_STATES if index.facts.is_verified else ())
    found = [*find_dead_engines(RunColumns(index))]
    for number, record in enumerate(index.header.sets):
        run = RunColumns(of_replicaset(index, number), number)
        finders = _OF_BACKENDS if record.core.forwards else of_workers
        name = f"{record.name} ({record.core.models[0]}): " if len(index.header.sets) > 1 else ""
        found += [
            structs.replace(each, title=f"{name}{each.title}", replicaset=number)
            for find in finders
            for each in find(run)
        ]
    return sorted(found, key=lambda each: (may_follow(each, found), -each.impact_ppm, each.kind))


def may_follow(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether a finding may be a consequence of another one, which then is the more serious."""
    causes = {each.replicaset for each in findings if each.kind not in _CONSEQUENCES}
    return finding.kind in _CONSEQUENCES and finding.replicaset in causes
